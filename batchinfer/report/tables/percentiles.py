"""p50, p90 and p99 of a column of a spooled table, by DuckDB, one column in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

QUANTILES = (0.5, 0.9, 0.99)
NAMES = ("p50", "p90", "p99")

Spread = tuple[float | None, float | None, float | None]
UNKNOWN: Spread = (None, None, None)


@contextmanager
def opened() -> Iterator[Any]:
    """The database that finds percentiles: one for all columns, because opening one takes longer than a short run's
    percentiles."""
    config: dict[str, str | bool | int | float | list[str]] = {
        "threads": 2,
        "temp_directory": "",
        "python_enable_replacements": False,
    }
    with duckdb.connect(":memory:", config=config) as database:
        yield database


def spread(database: Any, path: Path, column: str) -> Spread:
    """Percentiles of a column with linear interpolation; nulls are left out, all None without values.

    Holds the column's values at 8 bytes each, 80 MB for ten million requests.
    """
    wanted = ", ".join(f"quantile_cont({column}, {q})" for q in QUANTILES)
    return _one(database, f"select {wanted} from read_parquet(?)", path)


def weighted_spread(database: Any, path: Path, column: str, weight: str) -> Spread:
    """Percentiles of a column whose rows count `weight` times each: the least that reaches the share."""
    wanted = ", ".join(f"min(v) filter (reached >= {q} * whole)" for q in QUANTILES)
    return _one(
        database,
        f"""
        with rows as (
            select {column} as v, {weight} as w from read_parquet(?)
            where {column} is not null and {weight} > 0
        ), ranked as (
            select v, sum(w) over (order by v rows unbounded preceding) as reached, sum(w) over () as whole
            from rows
        )
        select {wanted} from ranked
        """,
        path,
    )


def _one(database: Any, query: str, path: Path) -> Spread:
    found = database.execute(query, [str(path)]).fetchone()
    if found is None:
        return UNKNOWN
    p50, p90, p99 = found
    return p50, p90, p99
