"""The plan: all requests to run, in order, in a Parquet file that is read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.filesystem.rebatch import parquet_batches, rebatch, sample_segments

_ROWS_READ = 8192  # rows per read; reading 512 at a time takes twice as long

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
        ("final_users", pa.int32()),  # users without a further attempt
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class PlanBatch:
    """Consecutive requests of a plan.

    Attributes:
        table: One row per request, with the columns of PLAN_SCHEMA.
    """

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[bytes]:
        """Return the work key of each request of the batch."""
        chunks = self.table.column("key").chunks
        return [key for chunk in chunks for key in _values(chunk)]

    @property
    def params(self) -> list[str]:
        """Return the sampling parameters of each request of the batch, as JSON."""
        found = self.table.column("params").combine_chunks().dictionary_encode()
        texts = found.dictionary.to_pylist()
        return [texts[place] for place in found.indices.to_pylist()]

    def without(self, keys: AbstractSet[bytes]) -> PlanBatch:
        """Return the batch without the requests with these work keys."""
        kept = [key not in keys for key in self.keys] if keys else ()
        return self if all(kept) else PlanBatch(self.table.filter(pa.array(kept)).combine_chunks())

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a numeric column of the batch, one value per request.

        Args:
            column: Name of a column without nulls, for example "token_count" or "users".
        """
        values: NDArray[Any] = self.table.column(column).to_numpy()
        return values


def _values(keys: pa.FixedSizeBinaryArray) -> list[bytes]:
    # to_pylist() is slower, because it creates an Arrow scalar per value
    width = keys.type.byte_width
    data = keys.buffers()[1].slice(keys.offset * width, len(keys) * width).to_pybytes()
    return [data[start : start + width] for start in range(0, len(data), width)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests that a run must compute, as a Parquet file in order of execution, and counts over the whole job.

    `rows = error_rows + distinct + duplicates`; `distinct = present + to_run - without_rows`. Token counts cover the
    requests `to_run`.

    Attributes:
        path: Parquet file with the columns of PLAN_SCHEMA, one row per request, in order of execution.
        prefixes: Parquet file with the prefix tree, in the columns of PREFIX_SCHEMA.
        rows: Number of rows of the job.
        error_rows: Number of rows that can never run.
        distinct: Number of different work keys of the rows.
        duplicates: Number of rows with the work key of an earlier row.
        present: Number of work keys whose answers are stored, or that engines have received already.
        to_run: Number of requests to compute.
        prompt_tokens: Prompt tokens of the requests to compute.
        expected_tokens: Maximum output tokens of the requests to compute.
        shared_prefix_tokens: Prompt tokens that need not be computed, because an earlier request has the same prefix.
        rows_to_run: Number of rows that wait for the requests to compute.
        longest: Largest number of prompt and output tokens of a request or of its later attempts. 0 without requests.
        again_tokens: Prompt tokens to compute that earlier requests of this run computed already, as shared prefixes.
            They may have been evicted from the cache.
        without_rows: Number of requests to compute that serve no row: the prompts of classify.calibrate.
        recurring: Estimated share (0 to 1) of `tokens_once` that rows not read yet will have as prefixes, too. 0 if not
            estimated.
    """

    path: Path
    prefixes: Path
    rows: int
    error_rows: int
    distinct: int
    duplicates: int
    present: int
    to_run: int
    prompt_tokens: int
    expected_tokens: int
    shared_prefix_tokens: int
    rows_to_run: int
    longest: int
    again_tokens: int = 0
    without_rows: int = 0
    recurring: float = 0.0

    @property
    def answers_to_run(self) -> int:
        """Return the number of requests to compute whose answers serve rows of the job."""
        return self.to_run - self.without_rows

    @property
    def tokens_once(self) -> int:
        """Return the number of prompt tokens to compute, if each shared prefix is computed once."""
        return self.prompt_tokens - self.shared_prefix_tokens

    def rows_of(self, keys: AbstractSet[bytes]) -> int:
        """Return how many rows of the job get their answers from some requests of the plan.

        Args:
            keys: Work keys of the requests.
        """
        if not keys:
            return 0
        wanted, rows = pa.array(sorted(keys), pa.binary(32)), 0
        for batch in parquet_batches([self.path], _ROWS_READ, ["key", "users"]):
            found = batch.filter(pc.is_in(batch.column("key"), value_set=wanted))
            rows += pc.sum(found.column("users")).as_py() or 0
        return rows

    def batches(self, rows_per_batch: int, every: int = 1) -> Iterator[PlanBatch]:
        """Yield the requests of the plan in order of execution, in batches.

        Args:
            rows_per_batch: Requests per batch. The last batch may have fewer.
            every: If n > 1, yield only every n-th batch.
        """
        if every > 1:
            tables = sample_segments(self.path, rows_per_batch, every)
        else:
            tables = rebatch(parquet_batches([self.path], _ROWS_READ), rows_per_batch)
        yield from map(PlanBatch, tables)
