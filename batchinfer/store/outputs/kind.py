"""The protocol of a kind of answers: everything about it that is not the same for all kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.embedding import Embedding
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.request import Completion, Output, Request
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns
from batchinfer.store.index.index import AnswerSchema


class AskedOutputs(Protocol):
    """The parts of an index that say what its rows' answers hold."""

    @property
    def answers(self) -> AnswerSchema | None:
        """Return the schema of answers; None if the result has no columns of their parts."""

    @property
    def logprobs(self) -> int | None:
        """The most log-probabilities a token that a row asks for; None: the result has no column for them."""

    @property
    def prompt_logprobs(self) -> bool:
        """Whether the result has a column for log-probabilities of prompts."""

    @property
    def confidence(self) -> tuple[str, ...] | None:
        """The texts of which each answer is one; none: the values of its fields count, which its schema lists. None:
        the result has no column of confidence."""

    @property
    def reasoning(self) -> Reasoning | None:
        """How answers mark their reasoning; None: the result has no columns for it."""

    @property
    def tool_calls(self) -> CallStyle | None:
        """How answers write calls of tools; None: the result has no column for them."""

    @property
    def embedding(self) -> Embedding | None:
        """The vectors that rows ask for; None: none does."""

    @property
    def own_dimensions(self) -> bool:
        """Whether rows say themselves how many numbers their vectors have."""

    @property
    def scoring(self) -> Scoring | None:
        """Return what is scored behind the rows' prompts; None: nothing is."""

    @property
    def pairs(self) -> PairScoring | None:
        """Return the score of the rows' prompts and documents; None: they have no documents."""


class TokenBytes(Protocol):
    """The bytes of single tokens, and texts of several, as `batchinfer.input.tokenizer.token_texts` finds them."""

    @property
    def specials(self) -> frozenset[int]:
        """Ids that texts leave out."""

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, also where they are no whole characters."""

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of a prompt's tokens, special ones left out."""


class Receiver(Protocol):
    """Turns what engines give into what is stored, while a job runs."""

    def planned(self, requests: Iterable[Request]) -> None:
        """Expect the answers of these requests."""

    def received(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return what is stored of these completions, with an error where an answer is not as it should be."""


class OutputKind(Protocol):
    """A kind of answers. Its output is a class with `held_bytes` (`Output`); completions without one are errors."""

    @property
    def name(self) -> str:
        """The name that work keys and identities have for it. It never changes."""

    @property
    def version(self) -> int:
        """The version of its columns in a result: another one, and results are published anew."""

    @property
    def output(self) -> type[Output]:
        """The class of its outputs."""

    @property
    def stored(self) -> pa.Schema:
        """The columns that it adds to the parts of a store (see COMPLETION_SCHEMA); only parts that need them have
        them."""

    @property
    def answer(self) -> str:
        """The column of a result that people read as the answer."""

    @property
    def probability(self) -> str | None:
        """The column of a result that says how probable the answer is; None: there is none."""

    @property
    def figures(self) -> Mapping[str, str]:
        """Return what sums up the answers of a result: DuckDB aggregates over its rows with an answer, the table
        `answered`, by columns of the report's run table."""

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return what takes the answers of one run. `columns`: those of the job's schema."""

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return those columns of `stored` that any output needs, null where an output has nothing for one."""

    def read(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of `stored` that the result of such rows is made of."""

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        """Return how many rows of a result are made at a time, where they are large; None: as many as usual."""

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of a result, in order, without those that the job passes through."""

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return these columns, whose types may have to be cast to `schema`.

        `rows`: of the index; `matched`: the completion of each, in the columns of the store, or nulls.
        """

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the size of each row of a result, by which row groups are cut: values besides a few; 0 mostly."""

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the columns of a result that its lines in an OpenAI file are made of, and how many rows of them are
        read at a time (None: as many as usual). `names`: those that the result has. Raises ValueError for a kind that
        no OpenAI batch file asks for."""

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a request's response, but for its id, time and model: at least `object`. `answers` are the
        rows of the result that answer it, several with `n` only. `chat`: it asked for a chat completion; `encoding`:
        that of vectors which it asked for."""
