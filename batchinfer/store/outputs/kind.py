"""The protocols of kinds of answers: everything that differs between kinds."""

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
    """Converts token ids to bytes and texts. `batchinfer.input.tokenizer.token_texts` implements it."""

    @property
    def specials(self) -> frozenset[int]:
        """Return the ids of special tokens, which are left out of texts."""

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, given its id. They may be only a part of a character."""

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt, given its token ids. Special tokens are left out."""


class Receiver(Protocol):
    """Checks the answers of engines during a run, before they are stored."""

    def expect(self, requests: Iterable[Request]) -> None:
        """Register requests that are about to run. Their answers will be passed to `receive`."""

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions to store. Invalid answers are replaced by errors."""


class UncheckedAnswers:
    """A receiver that does not check answers."""

    def expect(self, requests: Iterable[Request]) -> None:
        """Do nothing: answers need no check."""

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions to store: unchanged, except that errors lose their output."""
        return [one if one.error is None else replace(one, output=None) for one in completions]


class OutputKind(ABC):
    """A kind of answers: its columns in the store and in results, and its format in OpenAI files.

    Attributes:
        name: Name in work keys and identities. It never changes.
        version: Version of its columns in a result. If it changes, results are published again.
        output: The class of its outputs. A completion without an output is an error.
        stored: Its columns in the store, in addition to COMPLETION_SCHEMA. Parts have them only if needed.
        answer: The column of a result with the answer.
        probability: The column of a result with the probability of the answer, or None.
        aggregates: A DuckDB aggregate over the rows with an answer, by column of the report's run table.
    """

    name: str
    version: int
    output: type[Output]
    stored: pa.Schema
    answer: str
    probability: str | None = None
    aggregates: Mapping[str, str] = MappingProxyType({})

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return a receiver, which checks the answers of a run before they are stored.

        Args:
            columns: The result columns for the fields of JSON answers. None: answers have no such columns.
            detokenizer: Converts tokens to text.
        """
        return UncheckedAnswers()

    @abstractmethod
    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the columns that the store needs for a batch of outputs, by column name.

        A column is left out if no output needs it. Otherwise it has a value per output, or null.

        Args:
            outputs: The outputs. None for an error.
        """

    def read(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of the store that are read to write a result.

        Args:
            requested: The outputs that the job requests.
        """
        return self.stored

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return how many result rows are written at a time, to limit memory. None: the default.

        Args:
            requested: The outputs that the job requests.
        """
        return None

    @abstractmethod
    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result in order, without the columns that are copied from the input.

        Args:
            requested: The outputs that the job requests.
        """

    @abstractmethod
    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result.

        It has the columns of `schema`. Their types may differ, but can be cast.

        Args:
            requested: The outputs that the job requests.
            rows: Rows of the index.
            matched: For each row the columns of its completion in the store, or nulls if it has none.
            detokenizer: Converts tokens to text.
        """

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the number of list values in each row of a result table, with shape [rows].

        Rows with many values, such as vectors, are written in smaller row groups.
        """
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the result columns that an OpenAI batch file needs, and how many rows to read at a time.

        The number is None for the default.

        Args:
            names: The columns of the result.

        Raises:
            ValueError: OpenAI batch files do not support this kind of answers.
        """
        raise ValueError(NOT_OPENAI)

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a response to an OpenAI request, without id, time and model.

        Args:
            answers: The result rows of the request; several only with `n`.
            chat: True for a chat completion, False for a text completion.
            tokens: Converts token ids to bytes and texts.
            encoding: The requested encoding of vectors, "float" or "base64", or None.

        Raises:
            ValueError: OpenAI batch files do not support this kind of answers.
        """
        raise ValueError(NOT_OPENAI)
