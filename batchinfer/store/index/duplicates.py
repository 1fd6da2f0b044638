"""Finds repeated custom ids and equal sampled rows among all rows that were read so far.

The result for a row depends only on the rows before it, not on how many rows were read when it was processed.
DuckDB finds both within a memory limit. Only parts that contain such rows are rewritten.
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
from batchinfer.filesystem.duck import connection, parquet
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.filesystem.part_writer import rewrite_part
from batchinfer.input.prompts.keys import token_bytes, work_key
from batchinfer.input.rows import row_error
from batchinfer.store.index.index import INPUT_ROW, attempt_columns
from batchinfer.store.index.token_store import TokenStore

Ids = NDArray[np.int64]
# Returns a part with changed rows. Args: the part, the positions of the rows, the second column of the query
Change = Callable[[pa.Table, Ids, Ids], pa.Table]

_AT_ONCE = 100_000  # rows per batch
_WORK_COLUMNS = ("key", "token_offset", "token_count", "params", "greedy", "expected_tokens")
_OF_ATTEMPTS = re.compile(r"(key|params|expected_tokens)_\d+")  # columns of later attempts


class EqualRows:
    """Turns rows with repeated custom ids into errors, and gives equal sampled rows different work keys.

    Equal sampled rows have the same prompt and parameters, but need different answers. `settle` processes the
    new parts of an index while later parts are still written.
    """

    def __init__(
        self,
        folder: Path,
        context: bytes,
        ops: FileOps,
        *,
        unique_ids: bool,
        attempts: int = 1,
        threads: int = 2,
        samples: bool = False,
    ) -> None:
        """Prepare to process the parts of an index, beginning with its first part.

        Args:
            folder: Folder for temporary files.
            context: The digest that enters every work key.
            ops: File operations.
            unique_ids: True to turn a row into an error row if an earlier row has the same custom id.
            attempts: Maximum attempts per row.
            threads: Threads of DuckDB.
            samples: True if an input row may have several rows in the index.
        """
        self._input_row = INPUT_ROW.name if samples else "row_id"
        self._folder, self._context, self._ops = folder, context, ops
        self._unique_ids, self._attempts, self._threads = unique_ids, attempts, threads
        self._settled = 0  # parts
        self._kept: list[Path] = []  # files with the original keys of renumbered rows

    def skip_parts(self, parts: int) -> None:
        """Skip the first `parts` parts of the index, such as parts reused from the last run.

        The caller guarantees that no sampled row in later parts equals a row in these parts.
        """
        self._settled, self._kept = parts, []

    @property
    def has_numbered_rows(self) -> bool:
        """Return True if equal sampled rows were given different work keys."""
        return bool(self._kept)

    def settle(self, parts: Sequence[Path], tokens: TokenStore) -> int:
        """Process the index parts that were added since the last call, and rewrite parts with changed rows.

        Args:
            parts: All index parts in row order, including parts from earlier calls.
            tokens: The prompts of the rows.

        Returns:
            The number of rows that became error rows in this call.

        Raises:
            StorageError: A part cannot be read or written.
            OutOfMemory: DuckDB exceeded its memory limit.
        """
        new = _NewRows(parts, self._settled, self._folder / "spill", self._ops, self._threads)
        errors = _refuse_repeated_ids(new, self._input_row) if self._unique_ids else 0
        kept = self._folder / f"equal-{len(self._kept)}.parquet"
        self._kept += _number_equal_samples(new, tokens, self._context, self._attempts, self._kept, kept)
        self._settled = len(parts)
        return errors


class _NewRows:
    def __init__(self, parts: Sequence[Path], settled: int, spill: Path, ops: FileOps, threads: int) -> None:
        self.parts, self._spill, self._ops, self._threads = parts, spill, ops, threads
        rows = [pq.read_metadata(part).num_rows for part in parts]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self.first_row, self.new_parts = sum(rows[:settled]), parts[settled:]

    def patch(self, query: str, change: Change) -> int:
        # The query selects row_id and a second column, and ends with a WHERE clause
        count = 0
        with connection(self._spill, threads=self._threads) as database:
            found = database.sql(f"{query} AND row_id >= {self.first_row} ORDER BY row_id")
            for number, rows, details in self._by_part(found.to_arrow_reader(_AT_ONCE)):
                with pq.ParquetFile(self.parts[number], page_checksum_verification=True) as file:
                    table = file.read()
                first = table.column("row_id")[0].as_py()
                rewrite_part(self.parts[number], change(table, rows - first, details), self._ops)
                count += len(rows)
        return count

    def _by_part(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Ids, Ids]]:
        number, held = 0, list[NDArray[np.int64]]()
        for batch in batches:
            found = np.stack([column.to_numpy() for column in batch.columns])
            parts = np.searchsorted(self._ends, found[0], side="right")
            starts = np.flatnonzero(np.diff(parts, prepend=number))
            for start, end in pairwise([0, *starts.tolist(), len(parts)]):
                if start in starts and held:
                    yield number, *np.concatenate(held, axis=1)
                    held = []
                if start < end:
                    number = int(parts[start])
                    held.append(found[:, start:end])
        if held:
            yield number, *np.concatenate(held, axis=1)


def _refuse_repeated_ids(new: _NewRows, input_row: str) -> int:
    if not new.new_parts:
        return 0
    rows = (
        f"SELECT row_id, {input_row} AS own, custom_id, error_code FROM {parquet(new.parts)} "
        "WHERE custom_id IS NOT NULL"
    )
    if new.first_row:  # usually few rows are new, so only their ids are searched
        rows += f" AND custom_id IN (SELECT custom_id FROM {parquet(new.new_parts)})"
    query = (
        "SELECT row_id, first FROM (SELECT row_id, own, error_code, min(own) OVER (PARTITION BY custom_id) AS first "
        f"FROM {_repeated(rows, 'custom_id')}) WHERE own > first AND error_code IS NULL"
    )
    return new.patch(query, _as_errors)


def _number_equal_samples(
    new: _NewRows,
    tokens: TokenStore,
    context: bytes,
    attempts: int,
    earlier: Sequence[Path],
    kept: Path,
) -> list[Path]:
    # The k-th of several equal sampled rows gets a work key that depends on k, in each attempt that samples.
    # The file `kept` gets the original keys of the changed rows, for the comparison in later calls
    if not new.new_parts:
        return []
    rows = f"SELECT row_id, key FROM {parquet(new.parts)} WHERE key IS NOT NULL AND NOT greedy"
    if earlier:
        rows += f" UNION ALL SELECT row_id, key FROM {parquet(earlier)}"
    query = (
        "SELECT row_id, k FROM (SELECT row_id, row_number() OVER (PARTITION BY key ORDER BY row_id) - 1 AS k "
        f"FROM {_repeated(rows, 'key')}) WHERE k > 0"
    )
    before: list[pa.Table] = []

    def numbered(table: pa.Table, places: Ids, occurrences: Ids) -> pa.Table:
        before.append(table.select(["row_id", "key"]).take(pa.array(places)))
        return _numbered(table, places, occurrences, tokens, context, attempts)

    if not new.patch(query, numbered):
        return []
    with storage(kept, "write"):
        pq.write_table(pa.concat_tables(before), kept)
    return [kept]


def _numbered(
    table: pa.Table, places: Ids, occurrences: Ids, tokens: TokenStore, context: bytes, attempts: int
) -> pa.Table:
    names = [name for attempt in range(1, attempts + 1) for name in attempt_columns(attempt)[:2]]
    rows = table.select(["token_offset", "token_count", *names]).take(pa.array(places))
    prompts = zip(*(rows.column(name).to_pylist() for name in ("token_offset", "token_count")), strict=True)
    ids = [token_bytes(tokens.read(*place)) for place in prompts]
    for attempt in range(1, attempts + 1):
        key, params, _ = attempt_columns(attempt)
        texts, keys = rows.column(params).to_pylist(), rows.column(key).to_pylist()
        same = {text for text in {*texts} if text is None or SamplingParams.from_json(text).greedy}
        for at, (text, prompt, times) in enumerate(zip(texts, ids, occurrences.tolist(), strict=True)):
            if text not in same:  # greedy answers are equal, and None means that the row has no such attempt
                keys[at] = work_key(context, text, prompt, times)
        table = _replaced(table, places, {key: keys})
    return table


def _repeated(rows: str, column: str) -> str:
    # Values are compared by their hashes, which take less memory
    hashes = f"SELECT hash({column}) AS hashed FROM ({rows}) GROUP BY hashed HAVING count(*) > 1"
    return f"({rows}) WHERE hash({column}) IN ({hashes})"


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
    changed = np.zeros(len(table), np.bool_)
    changed[places] = True
    for name, values in columns.items():
        position = table.schema.get_field_index(name)
        field, column = table.schema.field(name), table.column(name).combine_chunks()
        found = pc.replace_with_mask(column, pa.array(changed), pa.array(values, field.type))
        table = table.set_column(position, field, found)
    return table
