"""The Plan: the requests to run, in their order, on disk and read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.data.storage.rebatch import parquet_batches, rebatch

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
        return list(self.table.column("key").to_pylist())

    @property
    def params(self) -> list[str]:
        """`SamplingParams.to_json()` of each request."""
        return list(self.table.column("params").to_pylist())

    def numbers(self, column: str) -> NDArray[Any]:
        """A numeric column without nulls: seq, token_offset, token_count, expected_tokens, bucket,
        prefix_tokens or users."""
        values: NDArray[Any] = self.table.column(column).to_numpy()
        return values


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts over the whole job, and where the ordered requests lie.

    `rows = error_rows + distinct + duplicates`; `distinct = present + to_run`. Token counts are over `to_run` only.
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
    longest: int  # largest token_count + expected_tokens; 0 if nothing is to run

    def batches(self, rows_per_batch: int) -> Iterator[PlanBatch]:
        """The plan in order, `rows_per_batch` requests at a time (the last batch may be shorter)."""
        batches = parquet_batches([self.path], rows_per_batch)
        yield from (PlanBatch(table) for table in rebatch(batches, rows_per_batch))
