"""Prepared rows: prompts with parameters and work keys, and the facts that the index stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError, TokenIds
from batchinfer.input.prompts.row_facts import RowFacts
from batchinfer.input.tokenizer.reasoning_styles import Openings

KEY_TYPE = np.dtype("V32")  # the type of a work key


@dataclass(slots=True)
class PreparedRungs:
    """The work of n rows on one rung of the job's ladder. Arrays are as in Prepared.

    `params_of` is -1 for a row without work on this rung.
    """

    params_of: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    keys: bytes


class OwnTexts(NamedTuple):
    """Texts of n rows that determine how their answers are parsed.

    Args:
        texts: The distinct texts: tools as `known_tools` writes them, or labels as a JSON list.
        of: Per row the position in `texts` plus 1, or 0 for none. Empty if no row has a text.
    """

    texts: list[str]
    of: NDArray[np.int32]

    @classmethod
    def found(cls, numbers: dict[str, int], of: NDArray[np.int32]) -> OwnTexts:
        """Return the texts, given their numbers from 1 and the numbers of the rows."""
        return cls(list(numbers), of) if numbers else NO_TEXTS


NO_TEXTS = OwnTexts([], np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class FurtherPrompts:
    """Further prompts of rows with several inputs. They have the parameters of the first prompt.

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
class Prepared:
    """The prompts of n rows for the index. An error row has count 0, a zero key and parameter 0.

    Args:
        errors: The errors by row.
        params: The distinct sampling parameters as JSON.
        params_of: Per row the position in `params`, shape (n,).
        max_tokens: Shape (n,).
        counts: The number of prompt tokens, shape (n,).
        keys: The concatenated work keys.
        tokens: The concatenated prompts.
        openings: How each prompt ends: whether it has begun the reasoning, shape (n,).
        unread: The number of rows per argument that the chat template does not read.
        rungs: The further attempts.
        own_texts: The tools or labels of rows.
        known: True if an earlier run prepared the rows and their answers are stored; `tokens` is then empty.
        samples: The number of answers that each row asks for, 0 if it does not, shape (n,); None if no row asks. For a
            row with `further` prompts, each prompt gets one answer.
        dimensions: The size of vectors that each row asks for, 0 if it does not, shape (n,); None if no row asks.
        further: The further prompts of embedding requests.
    """

    errors: dict[int, RowError]
    params: list[str]
    params_of: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    counts: TokenIds
    keys: bytes
    tokens: TokenIds
    openings: Openings
    unread: dict[str, int] = field(default_factory=dict)
    rungs: Sequence[PreparedRungs] = ()
    own_texts: OwnTexts = NO_TEXTS
    known: bool = False
    samples: NDArray[np.int32] | None = None
    dimensions: NDArray[np.int32] | None = None
    further: FurtherPrompts = NO_PROMPTS

    def __len__(self) -> int:
        return len(self.counts)

    def tokens_there(self) -> NDArray[np.int64]:
        """Return the number of tokens per row that `tokens` contains."""
        return np.zeros(len(self), np.int64) if self.known else self.counts.astype(np.int64)

    def answers(self, usual: int) -> NDArray[np.int64]:
        """Return the number of answers per row; `usual` is the number for rows that ask for none."""
        if self.samples is None:
            return np.full(len(self), usual, np.int64)
        return np.where(self.samples > 0, self.samples, usual).astype(np.int64)

    def keys_of_new_work(self) -> bytes:
        """Return the work keys of the rows in `tokens` and of all further prompts."""
        first = np.frombuffer(self.keys, np.uint8).reshape(-1, 32)[self.tokens_there() > 0].tobytes()
        return first + self.further.keys


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The prompts of rows, and the facts that the index stores."""

    prompts: Prepared
    facts: RowFacts

    def __len__(self) -> int:
        return len(self.prompts)
