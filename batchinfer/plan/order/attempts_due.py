"""The attempt that each row of an index is at, in SQL: with a ladder (`on_invalid`) a row may run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchinfer.filesystem.duck import parquet
from batchinfer.store.index.index import attempt_columns
from batchinfer.store.results.attempts import IS_INVALID


def distinct_sql(index: Sequence[Path], reached: int, attempts: int) -> str:
    """Select the distinct keys of rows, of each row that of the attempt that it is at: with the place and the length of
    the prompt, the parameters, the most tokens of the answer, the number of rows, how many of them have no further
    attempt, and the most tokens that an attempt from this one on may come to.

    `reached`: the last attempt that a row may be at, of its `attempts`; if that is not the first one, the table
    `chosen` says which completions are invalid.
    """
    selects = [_at(attempt, reached, attempts, parquet(index)) for attempt in range(1, reached + 1)]
    # equal keys mean equal tokens and parameters: only the offset differs, and the smallest is as good as any
    return (
        "SELECT key, min(token_offset), min(token_count), min(params), min(expected_tokens), count(*), "
        f"count(*) FILTER (final), max(longest) FROM ({' UNION ALL '.join(selects)}) GROUP BY key"
    )


def _at(attempt: int, reached: int, attempts: int, source: str) -> str:
    """Select the rows that are at this attempt: all before are invalid, and it is not, or is the last one."""
    key, params, expected = attempt_columns(attempt)
    keys = [attempt_columns(number)[0] for number in range(1, attempts + 1)]
    later = [f"{name} IS NULL" for name in keys[attempt:]]
    final = " AND ".join(later) or "true"
    ends = [f"(key IS NOT NULL AND {key} IS NOT NULL)"]
    ends += [f"({name} IS NULL OR {_invalid(name)})" for name in keys[: attempt - 1]]
    if attempt < reached:
        ends.append(f"({final} OR NOT {_invalid(key)})")
    most = [attempt_columns(number)[2] for number in range(attempt, attempts + 1)]
    longest = most[0] if len(most) == 1 else f"greatest({', '.join(most)})"
    return (
        f"SELECT {key} AS key, token_offset, token_count, {params} AS params, {expected} AS expected_tokens, "
        f"{final} AS final, token_count + {longest} AS longest FROM {source} WHERE {' AND '.join(ends)}"
    )


def _invalid(key: str) -> str:
    return f"({key} IN (SELECT key FROM chosen WHERE {IS_INVALID}))"
