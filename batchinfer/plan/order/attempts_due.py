"""Builds SQL for the current attempt of each row. With a ladder (`on_invalid`), a row may have several attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchinfer.filesystem.duck import parquet
from batchinfer.store.index.index import attempt_columns
from batchinfer.store.results.attempts import IS_INVALID


def distinct_sql(index: Sequence[Path], reached: int, attempts: int) -> str:
    """Return a SQL query that yields one row per distinct work key among the current attempts of all input rows.

    The current attempt of a row is its first attempt whose answer is valid or missing. If all answers are invalid, it
    is the last attempt.

    Args:
        index: Parquet files of the index.
        reached: Highest number of a current attempt, counted from 1. Above 1, the database must have the table `chosen`
            (`load_chosen`), which marks invalid answers.
        attempts: Maximum number of attempts per row.

    Returns:
        The query. Its columns: work key; offset of the prompt tokens; their number; sampling parameters as JSON;
            expected output tokens; number of rows with this key; number of those rows without a further attempt; and
            the largest number of prompt plus output tokens of this or a later attempt.
    """
    selects = [_at(attempt, reached, attempts, parquet(index)) for attempt in range(1, reached + 1)]
    # Equal keys have equal tokens and parameters. Only offsets differ, and any of them works.
    return (
        "SELECT key, min(token_offset), min(token_count), min(params), min(expected_tokens), count(*), "
        f"count(*) FILTER (final), max(longest) FROM ({' UNION ALL '.join(selects)}) GROUP BY key"
    )


def _at(attempt: int, reached: int, attempts: int, source: str) -> str:
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
