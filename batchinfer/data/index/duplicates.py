"""Repeated custom ids and equal sampled rows are found once all rows are known.

Both are found by DuckDB within a memory limit; only parts that hold such rows are written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.index.index import attempt_columns
from batchinfer.data.index.token_store import TokenStore
from batchinfer.data.input.rows import row_error
from batchinfer.data.prompts.keys import token_bytes, work_key
from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import FileOps
from batchinfer.data.storage.part_writer import PART_ROWS, rewrite_part

Ids = NDArray[np.int64]
# What a part becomes, whose rows at these places are to change. The third is what the query found of each
Change = Callable[[pa.Table, Ids, Ids], pa.Table]

_WORK_COLUMNS = ("key", "token_offset", "token_count", "params", "greedy", "expected_tokens")
_OF_ATTEMPTS = re.compile(r"(key|params|expected_tokens)_\d+")  # after the first


def refuse_repeated_ids(parts: Sequence[Path], spill: Path, ops: FileOps, threads: int = 2) -> int:
    """Turn every row whose custom_id an earlier row has into an error row; how many became one."""
    query = (
        "SELECT row_id, first FROM (SELECT row_id, error_code, min(row_id) OVER (PARTITION BY custom_id) AS first "
        f"FROM {_repeated(parts, 'custom_id', 'custom_id IS NOT NULL')}) "
        "WHERE row_id > first AND error_code IS NULL ORDER BY row_id"
    )
    return _patch(parts, query, spill, ops, threads, _as_errors)


def number_equal_samples(
    parts: Sequence[Path],
    tokens: TokenStore,
    context: bytes,
    spill: Path,
    ops: FileOps,
    threads: int = 2,
    attempts: int = 1,
) -> int:
    """Give the k-th of otherwise equal sampled rows a key that says k; how many rows were given one. Its keys of later
    attempts say so, too, where these are sampled.
    """
    query = (
        "SELECT row_id, k FROM (SELECT row_id, row_number() OVER (PARTITION BY key ORDER BY row_id) - 1 AS k "
        f"FROM {_repeated(parts, 'key', 'key IS NOT NULL AND NOT greedy')}) "
        "WHERE k > 0 ORDER BY row_id"
    )

    def numbered(table: pa.Table, places: Ids, occurrences: Ids) -> pa.Table:
        names = [name for attempt in range(1, attempts + 1) for name in attempt_columns(attempt)[:2]]
        rows = table.select(["token_offset", "token_count", *names]).take(pa.array(places))
        prompts = zip(
            *(rows.column(name).to_pylist() for name in ("token_offset", "token_count")), strict=True
        )
        ids = [token_bytes(tokens.read(*place)) for place in prompts]
        for attempt in range(1, attempts + 1):
            key, params, _ = attempt_columns(attempt)
            texts, keys = rows.column(params).to_pylist(), rows.column(key).to_pylist()
            same = {text for text in {*texts} if text is None or SamplingParams.from_json(text).greedy}
            for at, (text, prompt, times) in enumerate(zip(texts, ids, occurrences.tolist(), strict=True)):
                if text not in same:  # greedy work is the same each time, and a row may lack an attempt
                    keys[at] = work_key(context, text, prompt, times)
            table = _replaced(table, places, {key: keys})
        return table

    return _patch(parts, query, spill, ops, threads, numbered)


def _repeated(parts: Sequence[Path], column: str, where: str) -> str:
    """Return the rows that may have a value which another row has, too, as SQL reads them: mostly none. Hashes say so,
    which take a part of the memory that the values take."""
    rows = f"{parquet(parts)} WHERE {where}"
    hashes = f"SELECT hash({column}) AS hashed FROM {rows} GROUP BY hashed HAVING count(*) > 1"
    return f"{rows} AND hash({column}) IN ({hashes})"


def _as_errors(table: pa.Table, places: Ids, firsts: Ids) -> pa.Table:
    errors = [_error(first) for first in firsts.tolist()]
    later = [name for name in table.schema.names if _OF_ATTEMPTS.fullmatch(name)]
    columns: dict[str, list[object]] = {name: [None] * len(errors) for name in (*_WORK_COLUMNS, *later)}
    columns["error_code"] = [error.code for error in errors]
    columns["error_class"] = [error.error_class for error in errors]
    columns["error_message"] = [error.message for error in errors]
    columns["retryable"] = [error.retryable for error in errors]
    return _replaced(table, places, columns)


def _error(first: int) -> RowError:
    return row_error(
        "duplicate_custom_id", f"row {first} has the same custom_id, and input.unique_ids is true"
    )


def _replaced(
    table: pa.Table, places: Ids, columns: dict[str, list[object]] | dict[str, list[bytes]]
) -> pa.Table:
    """Return the table with other values at these places, which ascend."""
    changed = np.zeros(len(table), np.bool_)
    changed[places] = True
    for name, values in columns.items():
        position = table.schema.get_field_index(name)
        field, column = table.schema.field(name), table.column(name).combine_chunks()
        found = pc.replace_with_mask(column, pa.array(changed), pa.array(values, field.type))
        table = table.set_column(position, field, found)
    return table


def _patch(parts: Sequence[Path], query: str, spill: Path, ops: FileOps, threads: int, change: Change) -> int:
    if not parts:
        return 0
    count = 0
    with connection(spill, threads=threads) as database:
        for number, rows, details in _by_part(database.sql(query).to_arrow_reader(PART_ROWS)):
            with pq.ParquetFile(parts[number], page_checksum_verification=True) as file:
                table = file.read()
            first = table.column("row_id")[0].as_py()
            rewrite_part(parts[number], change(table, rows - first, details), ops)
            count += len(rows)
    return count


def _by_part(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield the number of each part, its rows and what was found of them. The rows come in their order."""
    number, held = 0, list[NDArray[np.int64]]()
    for batch in batches:
        found = np.stack([column.to_numpy() for column in batch.columns])
        parts = found[0] // PART_ROWS
        cuts = np.flatnonzero(np.diff(parts, prepend=number))
        for start, end in pairwise([0, *cuts.tolist(), len(parts)]):
            if start in cuts and held:
                yield number, *np.concatenate(held, axis=1)
                held = []
            if start < end:
                number = int(parts[start])
                held.append(found[:, start:end])
    if held:
        yield number, *np.concatenate(held, axis=1)
