"""How columns of the run table follow from columns that stand before them. What is not known is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.report.column import Formula
from batchinfer.report.tables.exit_status import is_published

Row = Mapping[str, Any]


def over(top: str, *bottom: str) -> Formula:
    """Divide a column by others, one after the other; None where one is not known, or there is nothing to divide by."""

    def divided(row: Row) -> float | None:
        value: float | None = row[top]
        for name in bottom:
            value = quotient(value, row[name])
        return value

    return divided


def quotient(top: float | None, bottom: float | None) -> float | None:
    """Divide; None where one side is not known, or there is nothing to divide by."""
    return None if top is None or not bottom else top / bottom


def known_sum(*names: str) -> Formula:
    """Add the columns that are known; None where none is."""

    def added(row: Row) -> float | None:
        known = [row[name] for name in names if row[name] is not None]
        return sum(known) if known else None

    return added


def while_computing(*names: str) -> Formula:
    """Add the columns that are known, for a run that computed something; None for others."""
    added = known_sum(*names)
    return lambda row: added(row) if row["steps"] else None


def cost_of(seconds: str) -> Formula:
    """Return the price of the machine for the time in that column."""

    def cost(row: Row) -> float | None:
        price, took = row["price_per_hour"], row[seconds]
        return None if price is None or took is None else price * took / 3600

    return cost


def wall_s(row: Row) -> float:
    took: float = (row["finished_at"] - row["started_at"]).total_seconds()
    return took


def host_s(row: Row) -> float | None:
    """Return what is left of the engine's time without the device's and without waiting for rows, and of the run's."""
    rest = row["engine_s"]
    if rest is not None:
        rest -= (row["model_s"] or 0.0) + (row["waited_s"] or 0.0)
    total: float | None = known_sum("rest", "other_s")({"rest": rest, "other_s": row["other_s"]})
    return total


def energy_per_token(row: Row) -> float | None:
    if row["energy_j"] is None:
        return None
    return quotient(row["energy_j"], row["prompt_tokens_run"] + (row["output_tokens"] or 0))


def forecast_error(row: Row) -> float | None:
    wall, forecast = row["engine_wall_s"], row["forecast_s"]
    return None if wall is None or forecast is None else quotient(wall - forecast, forecast)


def deadline_met(row: Row) -> bool | None:
    if row["deadline"] is None:
        return None
    return is_published(row["exit_status"]) and row["finished_at"] <= row["deadline"]


def goodput(row: Row) -> float | None:
    if row["deadline"] is None:
        return None
    until = min(row["deadline"], row["finished_at"])
    return quotient(row["deadline_output_tokens"], max(0.0, (until - row["started_at"]).total_seconds()))
