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
    """A segment of the plan, in order. Arrays have one value per request."""

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def keys(self) -> list[bytes]:
        """Return the work key of each request."""
        chunks = self.table.column("key").chunks
        return [key for chunk in chunks for key in _values(chunk)]

    @property
    def params(self) -> list[str]:
        """Return the sampling parameters of each request, as JSON."""
        found = self.table.column("params").combine_chunks().dictionary_encode()
        texts = found.dictionary.to_pylist()
        return [texts[place] for place in found.indices.to_pylist()]

    def without(self, keys: AbstractSet[bytes]) -> PlanBatch:
        """Return the segment without the requests of these keys."""
        kept = [key not in keys for key in self.keys] if keys else ()
        return self if all(kept) else PlanBatch(self.table.filter(pa.array(kept)).combine_chunks())

    def numbers(self, column: str) -> NDArray[Any]:
        """Return a numeric column without nulls, for example token_count or users."""
        values: NDArray[Any] = self.table.column(column).to_numpy()
        return values


def _values(keys: pa.FixedSizeBinaryArray) -> list[bytes]:
    """Return the values of an array without nulls. Faster than to_pylist(), which makes an object per value."""
    width = keys.type.byte_width
    data = keys.buffers()[1].slice(keys.offset * width, len(keys) * width).to_pybytes()
    return [data[start : start + width] for start in range(0, len(data), width)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts over the whole job, and the files with the ordered requests.

    `rows = error_rows + distinct + duplicates`; `distinct = present + to_run - without_rows`. Token counts cover
    the requests `to_run`.
    """

    path: Path  # a Parquet file in PLAN_SCHEMA, ordered by seq
    prefixes: Path  # the prefix tree: a Parquet file in PREFIX_SCHEMA
    rows: int
    error_rows: int  # rows of the input that can never run
    distinct: int  # different keys
    duplicates: int  # rows served by another row's key
    present: int  # keys that the completion store holds
    to_run: int
    prompt_tokens: int
    expected_tokens: int  # output tokens, at most
    shared_prefix_tokens: int  # prompt tokens that an earlier row shares, which need not run
    rows_to_run: int  # rows that the answers of `to_run` serve
    longest: int  # largest token_count + expected_tokens of an attempt to come; 0 if nothing is to run
    # Tokens of prefixes that this run used before it knew all rows, and that it may have to compute again
    again_tokens: int = 0
    without_rows: int = 0  # requests in `to_run` that serve no row: the prompt of classify.calibrate
    # Estimated share (0 to 1) of the distinct prompt tokens to run that later rows will share; 0 if not estimated
    recurring: float = 0.0

    @property
    def answers_to_run(self) -> int:
        """Return the number of requests to run that serve rows."""
        return self.to_run - self.without_rows

    @property
    def tokens_once(self) -> int:
        """Return the prompt tokens to run, with each prefix counted once."""
        return self.prompt_tokens - self.shared_prefix_tokens

    def rows_of(self, keys: AbstractSet[bytes]) -> int:
        """Return the number of planned rows that the answers to these keys serve."""
        if not keys:
            return 0
        wanted, rows = pa.array(sorted(keys), pa.binary(32)), 0
        for batch in parquet_batches([self.path], _ROWS_READ, ["key", "users"]):
            found = batch.filter(pc.is_in(batch.column("key"), value_set=wanted))
            rows += pc.sum(found.column("users")).as_py() or 0
        return rows

    def batches(self, rows_per_batch: int, every: int = 1) -> Iterator[PlanBatch]:
        """Yield the plan in order, in batches of `rows_per_batch` requests. The last batch may be shorter.

        If `every` is n, only the middle one of each n batches is yielded.
        """
        if every > 1:
            tables = sample_segments(self.path, rows_per_batch, every)
        else:
            tables = rebatch(parquet_batches([self.path], _ROWS_READ), rows_per_batch)
        yield from map(PlanBatch, tables)
