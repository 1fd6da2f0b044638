"""The Plan: the requests to run, in their order, on disk and read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.filesystem.rebatch import parquet_batches, parquet_stretches, rebatch

_ROWS_READ = 8192  # at a time: batches of 512 rows take Parquet's reader twice as long

PLAN_SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("key", pa.binary(32)),
        ("token_offset", pa.int64()),
        ("token_count", pa.int32()),
        ("params", pa.string()),
        ("expected_tokens", pa.int32()),
        ("bucket", pa.int32()),
        ("prefix_group", pa.int64()),
        ("prefix_tokens", pa.int32()),
        ("users", pa.int32()),
        ("final_users", pa.int32()),  # of these, those that do not run again, whatever the answer is
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class PlanBatch:
    """A stretch of the plan, in order. Arrays are per request and all of the same length."""

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[bytes]:
        chunks = self.table.column("key").chunks
        return [key for chunk in chunks for key in _values(chunk)]

    @property
    def params(self) -> list[str]:
        """`SamplingParams.to_json()` of each request."""
        found = self.table.column("params").combine_chunks().dictionary_encode()
        texts = found.dictionary.to_pylist()
        return [texts[place] for place in found.indices.to_pylist()]

    def without(self, keys: AbstractSet[bytes]) -> PlanBatch:
        """Return the stretch but for the requests of these keys."""
        kept = [key not in keys for key in self.keys] if keys else ()
        return self if all(kept) else PlanBatch(self.table.filter(pa.array(kept)).combine_chunks())

    def numbers(self, column: str) -> NDArray[Any]:
        """A numeric column without nulls: seq, token_offset, token_count, expected_tokens, bucket,
        prefix_tokens, users or final_users."""
        values: NDArray[Any] = self.table.column(column).to_numpy()
        return values


def _values(keys: pa.FixedSizeBinaryArray) -> list[bytes]:
    """Return the values of an array without nulls: Arrow's own way makes an object of each first."""
    width = keys.type.byte_width
    data = keys.buffers()[1].slice(keys.offset * width, len(keys) * width).to_pybytes()
    return [data[start : start + width] for start in range(0, len(data), width)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts over the whole job, and where the ordered requests lie.

    `rows = error_rows + distinct + duplicates`; `distinct = present + to_run - without_rows`. Token counts are over
    `to_run` only.
    """

    path: Path  # a Parquet file in PLAN_SCHEMA, ordered by seq
    prefixes: Path  # the nodes of the prefix forest: a Parquet file in PREFIX_SCHEMA
    rows: int
    error_rows: int  # rows of the input that can never run
    distinct: int  # different keys
    duplicates: int  # rows served by another row's key
    present: int  # keys that the completion store holds
    to_run: int
    prompt_tokens: int
    expected_tokens: int  # output tokens, at most
    shared_prefix_tokens: int  # prompt tokens that need not run, as an earlier row has them, too
    rows_to_run: int  # rows that the answers of `to_run` serve
    longest: int  # largest token_count + expected_tokens of an attempt to come; 0 if nothing is to run
    # Of prefixes that this run had begun to use before it knew all of these rows: so many it may have to run once more
    again_tokens: int = 0
    without_rows: int = 0  # of `to_run`, those that answer no row: the prompt of classify.calibrate
    # Of the tokens to run, each prefix once, the part that rows to come are expected to have, too; 0 where nobody asked
    recurring: float = 0.0

    @property
    def answers_to_run(self) -> int:
        """Return how many of the requests to run answer rows."""
        return self.to_run - self.without_rows

    @property
    def tokens_once(self) -> int:
        """Return the prompt tokens to run, where each prefix runs once."""
        return self.prompt_tokens - self.shared_prefix_tokens

    def rows_of(self, keys: AbstractSet[bytes]) -> int:
        """Count the rows that the answers to these keys serve, as far as they are planned."""
        if not keys:
            return 0
        wanted, rows = pa.array(sorted(keys), pa.binary(32)), 0
        for batch in parquet_batches([self.path], _ROWS_READ, ["key", "users"]):
            found = batch.filter(pc.is_in(batch.column("key"), value_set=wanted))
            rows += pc.sum(found.column("users")).as_py() or 0
        return rows

    def batches(self, rows_per_batch: int, every: int = 1) -> Iterator[PlanBatch]:
        """The plan in order, `rows_per_batch` requests at a time (the last batch may be shorter); `every`: only the
        middle one of this many batches."""
        if every > 1:
            tables = parquet_stretches(self.path, rows_per_batch, every)
        else:
            tables = rebatch(parquet_batches([self.path], _ROWS_READ), rows_per_batch)
        yield from map(PlanBatch, tables)
