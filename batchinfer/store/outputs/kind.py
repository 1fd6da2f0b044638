"""Protocols for kinds of answers: everything that differs between kinds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Completion, Output, Request
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns
from batchinfer.store.index.requested import RequestedOutputs

NOT_OPENAI = "OpenAI batch files cannot contain scores; use --to-openai only with text and embedding jobs"


class TokenBytes(Protocol):
    """Bytes and texts of tokens, implemented by `batchinfer.input.tokenizer.token_texts`."""

    @property
    def specials(self) -> frozenset[int]:
        """Return the ids of special tokens, which texts leave out."""

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character."""

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt without special tokens."""


class Receiver(Protocol):
    """Converts the answers of engines to stored completions during a run."""

    def expect(self, requests: Iterable[Request]) -> None:
        """Register requests whose answers will arrive."""

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions to store. An invalid answer becomes an error."""


class UncheckedAnswers:
    """A receiver that does not check answers."""

    def expect(self, requests: Iterable[Request]) -> None:
        """Do nothing: answers need no check."""

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions. Errors have no output."""
        return [one if one.error is None else replace(one, output=None) for one in completions]


class OutputKind(ABC):
    """A kind of answers.

    Its output is a class with `held_bytes` (`Output`); completions without an output are errors.
    """

    name: str  # in work keys and identities; it never changes
    version: int  # of its columns in a result; if it changes, results are published again
    output: type[Output]  # the class of its outputs
    stored: (
        pa.Schema
    )  # its columns in the store, in addition to COMPLETION_SCHEMA; parts have them only if needed
    answer: str  # the column of a result with the answer
    probability: str | None = None  # the column of a result with the probability of the answer
    # Figures of a result: DuckDB aggregates by column of the report's run table. They are computed over the table
    # `answered`, the rows with an answer
    figures: Mapping[str, str] = MappingProxyType({})

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return the receiver of the answers of a run. `columns` are the columns of the job's schema."""
        return UncheckedAnswers()

    @abstractmethod
    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the columns of `stored` that any output needs, with null for outputs without a value."""

    def read(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of `stored` that are needed for a result."""
        return self.stored

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return the number of result rows per batch, or None for the default."""
        return None

    @abstractmethod
    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result in order, without passthrough columns."""

    @abstractmethod
    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return these columns. Their types may have to be cast to `schema`.

        Args:
            requested: The outputs of the job.
            rows: Rows of the index.
            matched: The completion of each row in the columns of the store, or nulls.
            detokenizer: Converts tokens to text.
        """

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the size of each row of a result, as its number of list values. Row groups are limited by it."""
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the result columns that an OpenAI file needs, and the rows per batch, or None for the default.

        `names` are the columns of the result. Raises ValueError if OpenAI batch files do not support this kind.
        """
        raise ValueError(NOT_OPENAI)

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a response without id, time and model. It has at least `object`.

        Args:
            answers: The rows of the result for the request; several only with `n`.
            chat: The request is a chat completion.
            tokens: Bytes of tokens.
            encoding: The requested encoding of vectors.
        """
        raise ValueError(NOT_OPENAI)
