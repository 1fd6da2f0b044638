"""Log-probabilities in the completion store: columns that only the parts with some have.

A token takes 4 bytes before compression, and 8 more for each of the likeliest tokens at its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.core.errors import StorageError
from batchinfer.core.request import Completion, TokenLogprobs

LOGPROB_SCHEMA = pa.schema(
    [
        ("logprobs", pa.list_(pa.float32())),  # of each token of token_ids
        ("top_logprobs", pa.list_(pa.float32())),  # of the likeliest tokens, as many for each: end to end
        ("top_token_ids", pa.list_(pa.int32())),  # which tokens these are
    ]
)


def logprob_columns(completions: Sequence[Completion]) -> list[pa.Array]:
    """The columns of LOGPROB_SCHEMA; null for a completion without log-probabilities."""
    found = [completion.logprobs for completion in completions]
    return [
        _lists([None if one is None else one.chosen for one in found], np.float32),
        _lists([None if one is None else one.top.reshape(-1) for one in found], np.float32),
        _lists([None if one is None else one.top_ids.reshape(-1) for one in found], np.int32),
    ]


def logprob_bytes(found: TokenLogprobs | None) -> int:
    """Return the memory of log-probabilities, in bytes."""
    return 0 if found is None else found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes


def _lists(values: Sequence[NDArray[Any] | None], kind: type[np.generic]) -> pa.ListArray:
    parts = [np.empty(0, kind), *(part.astype(kind, copy=False) for part in values if part is not None)]
    lengths = [0 if part is None else len(part) for part in values]
    ends = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
    missing = pa.array([part is None for part in values], pa.bool_())
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate(parts)), mask=missing)


def have_logprobs(parts: Iterable[Path]) -> bool:
    """Whether any of these parts of a store has the columns. Raises StorageError."""
    return any(_has_logprobs(part) for part in parts)


def _has_logprobs(part: Path) -> bool:
    try:
        return LOGPROB_SCHEMA.names[0] in pq.read_schema(part).names
    except (pa.ArrowException, OSError) as error:
        raise damaged(part, error) from error


def damaged(part: Path, error: Exception) -> StorageError:
    """Return the error for a part that cannot be read."""
    what = " ".join(str(error).split())
    return StorageError(
        f"{part}: damaged: {what}; `batchinfer run --verify` drops it, and its rows run again"
    )


def padded(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns of `schema` that it lacks, null."""
    there = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in there else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
