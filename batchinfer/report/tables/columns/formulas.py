"""Formulas that compute columns of the run table from earlier columns. An unknown value is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.report.column import Formula
from batchinfer.report.tables.exit_status import is_published

Row = Mapping[str, Any]


def over(top: str, *bottom: str) -> Formula:
    """Return a formula that divides the column `top` by each of the columns `bottom`.

    A formula computes a value from a row. It gives None if a value is None or a divisor is 0.

    Args:
        top: The name of the column to divide.
        bottom: The names of the divisors.
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
    """Return a formula that adds up the columns with these names. Values of None are left out of the sum.

    A formula computes a value from a row. It gives None if all values are None.
    """

    def added(row: Row) -> float | None:
        known = [row[name] for name in names if row[name] is not None]
        return sum(known) if known else None

    return added


def while_computing(*names: str) -> Formula:
    """Return a formula that adds up columns as `known_sum` does.

    It gives None for a run without engine steps.
    """
    added = known_sum(*names)
    return lambda row: added(row) if row["steps"] else None


def cost_of(seconds: str) -> Formula:
    """Return a formula for the cost of the machine during a time. It gives None if price or time are unknown.

    Args:
        seconds: The name of the column with the time in seconds.
    """

    def cost(row: Row) -> float | None:
        price, took = row["price_per_hour"], row[seconds]
        return None if price is None or took is None else price * took / 3600

    return cost


def wall_s(row: Row) -> float:
    """Return the seconds from the start to the end of a run, given its row of the run table."""
    took: float = (row["finished_at"] - row["started_at"]).total_seconds()
    return took


def host_s(row: Row) -> float | None:
    """Return the seconds that the host spent on a run, given its row of the run table, or None if unknown.

    It is `engine_s` - `model_s` - `waited_s` + `other_s`, which are columns of the run table.
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
    """Return the relative error of a run's forecast time, or None without a forecast.

    0.1 means that the run took 10% longer than forecast.
    """
    wall, forecast = row["engine_wall_s"], row["forecast_s"]
    return None if wall is None or forecast is None else quotient(wall - forecast, forecast)


def deadline_met(row: Row) -> bool | None:
    """Return True if a run published its results by the deadline, or None without a deadline."""
    if row["deadline"] is None:
        return None
    return is_published(row["exit_status"]) and row["finished_at"] <= row["deadline"]


def goodput(row: Row) -> float | None:
    """Return the output tokens per second that a run produced in time, or None without a deadline.

    Tokens and seconds count until the deadline or the end of the run, whichever is earlier.
    """
    if row["deadline"] is None:
        return None
    until = min(row["deadline"], row["finished_at"])
    return quotient(row["deadline_output_tokens"], max(0.0, (until - row["started_at"]).total_seconds()))
