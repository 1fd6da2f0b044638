"""Prepared rows: prompts with parameters and work keys, and the facts that the index stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError, TokenIds
from batchinfer.input.prompts.row_facts import RowFacts
from batchinfer.input.tokenizer.reasoning_styles import ReasoningOpenings

KEY_TYPE = np.dtype("V32")  # the type of a work key


@dataclass(slots=True)
class PreparedRungs:
    """The requests of one further attempt (an item of `on_invalid`) at n rows.

    Attributes:
        params_of: Per row, the position of its parameters in `PreparedPrompts.params`; -1 if the row gets no such
            attempt. Shape (n,).
        max_tokens: The maximum number of tokens of each row's answer, shape (n,).
        keys: The concatenated work keys of the requests.
    """

    params_of: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    keys: bytes


class OwnTexts(NamedTuple):
    """The tools or labels of n rows, as texts. They determine how the rows' answers are parsed.

    Args:
        texts: The distinct texts: tools as JSON text in the format of `known_tools`, or labels as a JSON list.
        of: Per row the position of its text in `texts` plus 1, or 0 for none. Empty if no row has a text.
    """

    texts: list[str]
    of: NDArray[np.int32]

    @classmethod
    def found(cls, numbers: dict[str, int], of: NDArray[np.int32]) -> OwnTexts:
        """Return the texts of rows, given a number for each text.

        Args:
            numbers: Maps each distinct text to its number, from 1, in ascending order.
            of: Per row the number of its text, or 0 for none.
        """
        return cls(list(numbers), of) if numbers else NO_TEXTS


NO_TEXTS = OwnTexts([], np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class FurtherPrompts:
    """The prompts of embedding requests with several inputs, except the first prompt of each row.

    A row's prompts share its parameters.

    Args:
        rows: The row of each prompt, ascending, shape (m,).
        counts: The number of tokens per prompt, shape (m,).
        keys: The concatenated work keys.
        tokens: The concatenated prompts.
    """

    rows: NDArray[np.int32]
    counts: TokenIds
    keys: bytes
    tokens: TokenIds

    def __len__(self) -> int:
        return len(self.rows)


_NONE = np.zeros(0, np.int32)
NO_PROMPTS = FurtherPrompts(_NONE, _NONE, b"", _NONE)


@dataclass(slots=True)
class PreparedPrompts:
    """The prompts of n rows, as the index stores them. An error row has count 0, a zero key and parameter 0.

    Args:
        errors: The errors by row.
        params: The distinct sampling parameters as JSON.
        params_of: Per row the position of its parameters in `params`, shape (n,).
        max_tokens: The maximum number of tokens per answer, shape (n,).
        counts: The number of prompt tokens, shape (n,).
        keys: The concatenated work keys.
        tokens: The concatenated prompts.
        openings: Per prompt OPEN if it ends within reasoning, CLOSED if it has ended the reasoning, or NO_MARKER if
            neither; shape (n,).
        unread: By argument that the chat template does not read, the number of rows that set it.
        rungs: The requests of the further attempts, one element per attempt.
        own_texts: The tools or labels of rows.
        reused: True if an earlier run prepared the rows and their answers are stored; `tokens` is then empty.
        samples: The number of answers that each row asks for, 0 for the job's number, shape (n,); None if all are 0.
            For a row with `further` prompts, each prompt gets one answer.
        dimensions: The size of embeddings that each row asks for, 0 for the job's size, shape (n,); None if all are 0.
        further: The further prompts of embedding requests.
    """

    errors: dict[int, RowError]
    params: list[str]
    params_of: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    counts: TokenIds
    keys: bytes
    tokens: TokenIds
    openings: ReasoningOpenings
    unread: dict[str, int] = field(default_factory=dict)
    rungs: Sequence[PreparedRungs] = ()
    own_texts: OwnTexts = NO_TEXTS
    reused: bool = False
    samples: NDArray[np.int32] | None = None
    dimensions: NDArray[np.int32] | None = None
    further: FurtherPrompts = NO_PROMPTS

    def __len__(self) -> int:
        return len(self.counts)

    def tokens_there(self) -> NDArray[np.int64]:
        """Return the number of tokens in `tokens` that belong to each row, shape (n,): 0 for rows that were reused."""
        return np.zeros(len(self), np.int64) if self.reused else self.counts.astype(np.int64)

    def answers(self, usual: int) -> NDArray[np.int64]:
        """Return the number of answers per row, shape (n,).

        Args:
            usual: The number of answers for rows that do not ask for a number.
        """
        if self.samples is None:
            return np.full(len(self), usual, np.int64)
        return np.where(self.samples > 0, self.samples, usual).astype(np.int64)

    def keys_of_new_work(self) -> bytes:
        """Return the concatenated work keys of the prompts whose tokens are in `tokens` or `further`.

        First come the keys of the rows' first prompts, then the keys of further prompts.
        """
        first = np.frombuffer(self.keys, np.uint8).reshape(-1, 32)[self.tokens_there() > 0].tobytes()
        return first + self.further.keys


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The prepared prompts of consecutive rows, and the other facts about these rows that the index stores."""

    prompts: PreparedPrompts
    facts: RowFacts

    def __len__(self) -> int:
        return len(self.prompts)
