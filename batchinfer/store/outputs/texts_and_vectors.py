"""Answers of which each is a text, or a vector where its row asks for one: those of OpenAI requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.outputs.frame import Frame
from batchinfer.store.outputs.kind import AskedOutputs, TokenBytes
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
    """The kind of answers that are texts, beside which there may be vectors. See OutputKind for the methods. It has the
    name of those that are texts alone, as its answers that are texts are those."""

    def read(self, asked: AskedOutputs) -> pa.Schema:
        return pa.schema([*super().read(asked), *(() if asked.embedding is None else _VECTORS.stored)])

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        """Return the fewer rows of the two kinds."""
        own = super().batch_rows(asked)
        if asked.embedding is None:
            return own
        return vector_rows(asked) if own is None else min(own, vector_rows(asked))

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of texts, and behind them that of vectors, if any row asks for one."""
        ours = super().schema(asked)
        return ours if asked.embedding is None else ours.append(embedding_field(asked))

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        table = super().table(asked, rows, matched, detokenizer)
        if asked.embedding is None:
            return table
        vectors = embedding_column(asked, rows, matched, _have_vectors(Frame(rows, matched)).to_numpy())
        return table.append_column(embedding_field(asked), vectors)

    def _have_texts(self, frame: Frame) -> pa.ChunkedArray:
        found = super()._have_texts(frame)
        if _STORED not in frame.matched.schema.names:
            return found
        return pc.and_(found, pc.invert(_have_vectors(frame)))

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return how many log-probabilities each row has, and numbers of its vector."""
        own = super().entries(table)
        return own + embedding_entries(table) if EMBEDDING in table.schema.names else own

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        ours, lines = super().openai_columns(names)
        if EMBEDDING not in names:
            return ours, lines
        return [*ours, EMBEDDING], min(lines or VECTOR_LINES, VECTOR_LINES)

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return a list of embeddings for a request that has some, else a completion."""
        if answers[0].get(EMBEDDING) is None:
            return super().openai_body(answers, chat, tokens, encoding)
        return _VECTORS.openai_body(answers, chat, tokens, encoding)


def _have_vectors(frame: Frame) -> pa.ChunkedArray:
    """Return which rows have a vector."""
    return pc.and_(frame.answered, pc.is_valid(frame.matched.column(_STORED)))
