"""Answers that are vectors: what engines pool is stored, and normalised where a result is made of it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.embedding import Embedding
from batchinfer.core.request import Completion, Output, Request, Vector
from batchinfer.data.columns.logprob_column import Detokenizer
from batchinfer.data.columns.schema_columns import SchemaColumns
from batchinfer.data.outputs.dense_layers import passed
from batchinfer.data.outputs.frame import Frame, framed
from batchinfer.data.outputs.kind import AskedOutputs, Receiver, TokenBytes

STORED = pa.schema([("vector", pa.list_(pa.float32()))])
_HELD_VALUES = 1 << 20  # numbers of the vectors of a result that are made at a time


class VectorsKind:
    """The kind of answers that are vectors. See OutputKind for the methods."""

    name, version, output, answer = "vectors", 0, Vector, "embedding"
    probability: str | None = None
    stored = STORED

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return what takes vectors as they are."""
        return AsTheyAre()

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the column of vectors."""
        found = [one.values if isinstance(one, Vector) else None for one in outputs]
        return {} if all(one is None for one in found) else {STORED.names[0]: lists_of(found, np.float32)}

    def read(self, asked: AskedOutputs) -> pa.Schema:
        return STORED

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        return max(1, min(4096, _HELD_VALUES // _asked(asked).dimensions))

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of a result, whose vectors all have the same length."""
        kind = pa.list_(pa.float32(), _asked(asked).dimensions)
        return framed(pa.field("embedding", kind), pa.field("prompt_tokens", pa.int32()))

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        frame, made = Frame(rows, matched), _asked(asked)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        vectors = matched.column("vector").take(pa.array(np.flatnonzero(answered))).combine_chunks()
        return frame.around(
            embedding=_embedded(vectors, answered, made), prompt_tokens=rows.column("token_count")
        )

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the length of each vector."""
        return np.full(table.num_rows, table.schema.field("embedding").type.list_size, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        return ["embedding", "prompt_tokens"], 256

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return a list of one embedding."""
        prompt, numbers = answers[0]["prompt_tokens"], answers[0]["embedding"]
        as_text = encoding == "base64"
        embedding = b64encode(np.array(numbers, "<f4").tobytes()).decode() if as_text else numbers
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": embedding}],
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
        }


class AsTheyAre:
    """Takes the answers of a run that need no check."""

    def planned(self, requests: Iterable[Request]) -> None:
        """Expect nothing of them."""

    def received(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions; an error has no output."""
        return [one if one.error is None else replace(one, output=None) for one in completions]


def _asked(asked: AskedOutputs) -> Embedding:
    assert asked.embedding is not None, "the index of a job whose answers are vectors says which"
    return asked.embedding


def lists_of(found: Sequence[NDArray[Any] | None], kind: type[np.generic]) -> pa.ListArray:
    """Return a list of the values of each array, null for None."""
    values = np.concatenate([np.empty(0, kind), *(one for one in found if one is not None)]).astype(kind)
    ends = np.cumsum([0, *(0 if one is None else len(one) for one in found)]).astype(np.int32)
    missing = pa.array([one is None for one in found], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(values), mask=missing)


def _embedded(vectors: pa.ListArray, answered: NDArray[np.bool_], made: Embedding) -> pa.Array:
    """Return the vectors of the answered rows, behind the dense layers, shortened and normalised; null elsewhere."""
    count = len(vectors)
    inputs = made.dense[0].inputs if made.dense else made.dimensions
    values = vectors.flatten().to_numpy().reshape(count, -1) if count else np.empty((0, inputs))
    kept = passed(values.astype(np.float32, copy=False), made.dense)[:, : made.dimensions]
    finished = np.zeros((len(answered), made.dimensions), np.float32)
    finished[answered] = normalized(kept) if made.normalize else kept
    missing = pa.array(~answered)
    return pa.FixedSizeListArray.from_arrays(pa.array(finished.reshape(-1)), made.dimensions, mask=missing)


def normalized(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return vectors of length 1 in the same directions; one of zeros stays."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    found: NDArray[np.float64] = np.divide(wide, lengths, out=np.zeros_like(wide), where=lengths > 0)
    return found
