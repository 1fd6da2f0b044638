"""Answers that are vectors. Pooled states are stored, and normalised when a result is written."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.embedding import Embedding
from batchinfer.core.request import Output, Vector
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import DIMENSIONS, SAMPLE
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.dense_layers import apply_layers
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.kind import OutputKind, TokenBytes

EMBEDDING = "embedding"  # column of a result
STORED = pa.schema([("vector", pa.list_(pa.float32()))])
VECTOR_LINES = 256  # lines of an OpenAI file per batch
_HELD_VALUES = 1 << 20  # vector elements per batch of result rows


class VectorsKind(OutputKind):
    """Answers that are vectors. `OutputKind` documents the methods."""

    name, version, output, answer = "vectors", 0, Vector, EMBEDDING
    stored = STORED

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the column of the store for vectors, by name, or an empty dict if no output is a vector."""
        found = [one.values if isinstance(one, Vector) else None for one in outputs]
        return {} if all(one is None for one in found) else {STORED.names[0]: lists_of(found, np.float32)}

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return the number of result rows to write at a time."""
        return vector_rows(requested)

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result: the vector and the number of prompt tokens."""
        return frame_schema(embedding_field(requested), pa.field("prompt_tokens", pa.int32()))

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with vectors. `OutputKind.table` documents the arguments."""
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        return frame.result_table(
            embedding=embedding_column(requested, rows, matched, answered),
            prompt_tokens=rows.column("token_count"),
        )

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the number of vector elements in each row of a result table, with shape [rows]."""
        return embedding_entries(table)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the columns that an OpenAI file of embeddings needs, and how many rows to read at a time.

        Args:
            names: The columns of the result.
        """
        return [EMBEDDING, "prompt_tokens"], VECTOR_LINES

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a response to an embeddings request, with a vector for each row in `answers`.

        `OutputKind.openai_body` documents the arguments.
        """
        prompt = sum(row["prompt_tokens"] for row in answers)
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": row.get(SAMPLE.name, 0),
                    "embedding": _encoded(row[EMBEDDING], encoding),
                }
                for row in answers
            ],
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
        }


def embedding_field(requested: RequestedOutputs) -> pa.Field:
    """Return the result column of vectors.

    Vectors have a fixed length, unless rows may set their own dimensions.
    """
    size = -1 if requested.own_dimensions else _embedding(requested).dimensions
    return pa.field(EMBEDDING, pa.list_(pa.float32(), size))


def vector_rows(requested: RequestedOutputs) -> int:
    """Return the number of result rows to write at a time if their answers are vectors."""
    return max(1, min(4096, _HELD_VALUES // _embedding(requested).dimensions))


def embedding_column(
    requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, answered: NDArray[np.bool_]
) -> pa.Array:
    """Return the vectors of a result: pooled states after dense layers, truncation and normalisation.

    They are null for rows without a vector.

    Args:
        requested: The outputs that the job requests.
        rows: Rows of the index.
        matched: The completion of each row, with the pooled state.
        answered: A boolean per row: True if it has a vector.
    """
    made, places = _embedding(requested), pa.array(np.flatnonzero(answered))
    vectors = matched.column("vector").take(places).combine_chunks()
    if not requested.own_dimensions:
        return _embedding_array(vectors, answered, made)
    said = rows.column(DIMENSIONS.name).take(places).fill_null(made.dimensions).to_numpy()
    found: list[NDArray[np.float32] | None] = [None] * len(answered)
    whole, wanted = _apply_dense(vectors, made), np.flatnonzero(answered)
    for size in np.unique(said).tolist():
        own = np.flatnonzero(said == size)
        short = _normalize_if_set(whole[own][:, :size], made)
        for place, vector in zip(wanted[own].tolist(), short, strict=True):
            found[place] = vector
    return lists_of(found, np.float32)


def embedding_entries(table: pa.Table) -> NDArray[np.int64]:
    """Return the number of vector elements in each row of a result table, 0 for null, with shape [rows]."""
    size = table.schema.field(EMBEDDING).type
    if pa.types.is_fixed_size_list(size):
        return np.full(table.num_rows, size.list_size, np.int64)
    lengths = pc.list_value_length(table.column(EMBEDDING)).fill_null(0)
    return np.asarray(lengths.to_numpy(), np.int64)


def _encoded(vector: Sequence[float], encoding: str | None) -> str | Sequence[float]:
    return b64encode(np.array(vector, "<f4").tobytes()).decode() if encoding == "base64" else vector


def _embedding(requested: RequestedOutputs) -> Embedding:
    assert requested.embedding is not None, "the index of a job whose answers are vectors says which"
    return requested.embedding


def lists_of(found: Sequence[NDArray[Any] | None], kind: type[np.generic]) -> pa.ListArray:
    """Return an Arrow list array with one list per NumPy array. None becomes null.

    Args:
        found: The arrays.
        kind: The type of their elements.
    """
    values = np.concatenate([np.empty(0, kind), *(one for one in found if one is not None)]).astype(kind)
    ends = np.cumsum([0, *(0 if one is None else len(one) for one in found)]).astype(np.int32)
    missing = pa.array([one is None for one in found], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), mask=missing)


def _embedding_array(vectors: pa.ListArray, answered: NDArray[np.bool_], made: Embedding) -> pa.Array:
    finished = np.zeros((len(answered), made.dimensions), np.float32)
    finished[answered] = _normalize_if_set(_apply_dense(vectors, made)[:, : made.dimensions], made)
    missing = pa.array(~answered)
    return pa.FixedSizeListArray.from_arrays(pa.array(finished.reshape(-1)), made.dimensions, mask=missing)


def _apply_dense(vectors: pa.ListArray, made: Embedding) -> NDArray[np.float32]:
    count = len(vectors)
    inputs = made.dense[0].inputs if made.dense else made.dimensions
    values = vectors.flatten().to_numpy().reshape(count, -1) if count else np.empty((0, inputs))
    return apply_layers(values.astype(np.float32, copy=False), made.dense)


def _normalize_if_set(vectors: NDArray[np.float32], made: Embedding) -> NDArray[np.float32]:
    return normalized(vectors).astype(np.float32) if made.normalize else vectors


def normalized(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return vectors of shape [n, dimensions], each scaled to length 1. Zero vectors stay zero."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    found: NDArray[np.float64] = np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0)
    return found
