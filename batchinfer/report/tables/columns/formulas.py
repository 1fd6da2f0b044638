"""Formulas that compute columns of the run table from earlier columns. An unknown value is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.report.column import Formula
from batchinfer.report.tables.exit_status import is_published

Row = Mapping[str, Any]


def over(top: str, *bottom: str) -> Formula:
    """Return a formula that divides a column by all other columns.

    It gives None if a value is None or a divisor is 0.
    """

    def divided(row: Row) -> float | None:
        value: float | None = row[top]
        for name in bottom:
            value = quotient(value, row[name])
        return value

    return divided


def quotient(top: float | None, bottom: float | None) -> float | None:
    """Return `top` / `bottom`, or None if either is None or `bottom` is 0."""
    return None if top is None or not bottom else top / bottom


def known_sum(*names: str) -> Formula:
    """Return a formula that adds the columns whose value is not None. It gives None if all are None."""

    def added(row: Row) -> float | None:
        known = [row[name] for name in names if row[name] is not None]
        return sum(known) if known else None

    return added


def while_computing(*names: str) -> Formula:
    """Return a formula like `known_sum`, which gives None for a run without engine steps."""
    added = known_sum(*names)
    return lambda row: added(row) if row["steps"] else None


def cost_of(seconds: str) -> Formula:
    """Return a formula for the cost of the machine during the time in the column `seconds`."""

    def cost(row: Row) -> float | None:
        price, took = row["price_per_hour"], row[seconds]
        return None if price is None or took is None else price * took / 3600

    return cost


def wall_s(row: Row) -> float:
    """Return the seconds from the start to the end of a run, given its row."""
    took: float = (row["finished_at"] - row["started_at"]).total_seconds()
    return took


def host_s(row: Row) -> float | None:
    """Return the host's seconds in a run, or None if they are unknown.

    They are the engine's time without the device's and without waiting for rows, plus `other_s`.
    """
    rest = row["engine_s"]
    if rest is not None:
        rest -= (row["model_s"] or 0.0) + (row["waited_s"] or 0.0)
    total: float | None = known_sum("rest", "other_s")({"rest": rest, "other_s": row["other_s"]})
    return total


def energy_per_token(row: Row) -> float | None:
    """Return a run's energy per computed token in joules, or None if it is unknown."""
    if row["energy_j"] is None:
        return None
    return quotient(row["energy_j"], row["prompt_tokens_run"] + (row["output_tokens"] or 0))


def forecast_error(row: Row) -> float | None:
    """Return the relative error of a run's forecast time, or None. It is negative if the run was faster."""
    wall, forecast = row["engine_wall_s"], row["forecast_s"]
    return None if wall is None or forecast is None else quotient(wall - forecast, forecast)


def deadline_met(row: Row) -> bool | None:
    """Return True if a run published its results by the deadline, or None without a deadline."""
    if row["deadline"] is None:
        return None
    return is_published(row["exit_status"]) and row["finished_at"] <= row["deadline"]


def goodput(row: Row) -> float | None:
    """Return the output tokens per second until the deadline or the earlier end of the run.

    None without a deadline.
    """
    if row["deadline"] is None:
        return None
    until = min(row["deadline"], row["finished_at"])
    return quotient(row["deadline_output_tokens"], max(0.0, (until - row["started_at"]).total_seconds()))
