"""Answers to OpenAI requests: texts, or vectors for rows that request them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame
from batchinfer.store.outputs.kind import TokenBytes
from batchinfer.store.outputs.tokens import TokensKind
from batchinfer.store.outputs.vectors import (
    EMBEDDING,
    VECTOR_LINES,
    VectorsKind,
    embedding_column,
    embedding_entries,
    embedding_field,
    vector_rows,
)

_VECTORS = VectorsKind()
(_STORED,) = _VECTORS.stored.names


class TextsAndVectorsKind(TokensKind):
    """Answers of task: generate: texts, or vectors for rows that are OpenAI requests for embeddings.

    `OutputKind` documents the methods.
    """

    def read(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of the store that a result needs.

        They are the columns of texts and, if a row requests a vector, the column of vectors.
        """
        return pa.schema(
            [*super().read(requested), *(() if requested.embedding is None else _VECTORS.stored)]
        )

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return the number of result rows to write at a time, or None for the default.

        It is the number for texts. If a row requests a vector, it is at most the number for vectors.
        """
        own = super().batch_rows(requested)
        if requested.embedding is None:
            return own
        return vector_rows(requested) if own is None else min(own, vector_rows(requested))

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result: columns of texts and, if a row requests one, the vector."""
        ours = super().schema(requested)
        return ours if requested.embedding is None else ours.append(embedding_field(requested))

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with texts or vectors. `OutputKind.table` documents the arguments."""
        table = super().table(requested, rows, matched, detokenizer)
        if requested.embedding is None:
            return table
        vectors = embedding_column(requested, rows, matched, _have_vectors(Frame(rows, matched)).to_numpy())
        return table.append_column(embedding_field(requested), vectors)

    def _have_texts(self, frame: Frame) -> pa.ChunkedArray:
        found = super()._have_texts(frame)
        if _STORED not in frame.matched.schema.names:
            return found
        return pc.and_(found, pc.invert(_have_vectors(frame)))

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the number of list values in each row of a result table, with shape [rows].

        Log-probabilities and vector elements count.
        """
        own = super().entries(table)
        return own + embedding_entries(table) if EMBEDDING in table.schema.names else own

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the columns that an OpenAI file needs, and how many rows to read at a time (None: default).

        Args:
            names: The columns of the result.
        """
        ours, lines = super().openai_columns(names)
        if EMBEDDING not in names:
            return ours, lines
        return [*ours, EMBEDDING], min(lines or VECTOR_LINES, VECTOR_LINES)

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a response: embeddings if the answers are vectors, else a completion.

        `OutputKind.openai_body` documents the arguments.
        """
        if answers[0].get(EMBEDDING) is None:
            return super().openai_body(answers, chat, tokens, encoding)
        return _VECTORS.openai_body(answers, chat, tokens, encoding)


def _have_vectors(frame: Frame) -> pa.ChunkedArray:
    return pc.and_(frame.answered, pc.is_valid(frame.matched.column(_STORED)))
