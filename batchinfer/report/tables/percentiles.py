"""Computes percentiles of latencies with DuckDB, with one column in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OF_REQUESTS = ("queue", "ttft", "tpot", "latency")
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}  # of the run table

_ITL = """
WITH ranked AS (
    SELECT interval_s, sum(decode_tokens) OVER (ORDER BY interval_s ROWS UNBOUNDED PRECEDING) AS reached,
        sum(decode_tokens) OVER () AS whole
    FROM {steps} WHERE interval_s IS NOT NULL AND decode_tokens > 0
)
SELECT {wanted} FROM ranked
"""


def percentiles(
    database: Any, requests: str, steps: str, shares: Sequence[float]
) -> dict[str, list[float | None]]:
    """Return percentiles of the latencies queue, ttft, tpot, latency and itl in seconds, by name.

    Percentiles are interpolated, except for itl (inter-token latency): each step counts once per token
    that it decoded.

    Args:
        database: A DuckDB connection.
        requests: The table of requests, as SQL.
        steps: The table of steps, as SQL.
        shares: Percentiles as shares from 0 to 1.

    Returns:
        For each latency a value per element of `shares`, None without requests.
    """
    reached = [f"{share:.6f}::DOUBLE" for share in shares]
    found: dict[str, list[float | None]] = {}
    for name in OF_REQUESTS:
        query = f"SELECT quantile_cont({name}_s, [{', '.join(reached)}]) FROM {requests}"
        ((values,),) = database.execute(query).fetchall()
        found[name] = list(values or [None] * len(reached))
    wanted = ", ".join(f"min(interval_s) FILTER (reached >= {share} * whole)" for share in reached)
    found["itl"] = list(database.execute(_ITL.format(steps=steps, wanted=wanted)).fetchone())
    return found


def latency_columns(database: Any) -> dict[str, float | None]:
    """Return the values of the latency columns of the run table, by column name.

    Args:
        database: A DuckDB connection with the views `requests` and `steps` of the run.
    """
    found = percentiles(database, "requests", "steps", list(SHARES.values()))
    return {
        f"{name}_{share}_s": value
        for name, values in found.items()
        for share, value in zip(SHARES, values, strict=True)
    }
