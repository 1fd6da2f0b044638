"""Counts the tokens that a run saved because rows share the answer of an equal row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from batchinfer.filesystem.duck import connection, parquet


def saved_tokens(index_parts: Sequence[Path], parts: Sequence[Path], spill: Path) -> tuple[int, int]:
    """Return how many prompt tokens and output tokens were saved because duplicates share an answer.

    Args:
        index_parts: Parts of the index.
        parts: Parts of the store. Only answers in these parts count.
        spill: Folder for temporary files.

    Raises:
        StorageError: A file cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    if not parts or not index_parts:
        return 0, 0
    shared = (
        "SELECT key, count(*) - 1 AS others, any_value(token_count) AS prompt "
        f"FROM {parquet(index_parts)} WHERE key IS NOT NULL GROUP BY key HAVING count(*) > 1"
    )
    answers = f"SELECT key, len(token_ids) AS answer FROM {parquet(parts)} WHERE error_code IS NULL"
    with connection(spill) as database:
        query = f"SELECT coalesce(sum(others * prompt), 0), coalesce(sum(others * answer), 0) FROM ({shared})"
        ((prompts, texts),) = database.execute(f"{query} JOIN ({answers}) USING (key)").fetchall()
    return int(prompts), int(texts)
