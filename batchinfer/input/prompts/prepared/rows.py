"""Rows become prompts with parameters and keys, and facts that the index keeps besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError, TokenIds
from batchinfer.input.prompts.row_facts import RowFacts
from batchinfer.input.tokenizer.reasoning_styles import Openings

KEY_TYPE = np.dtype("V32")  # of a work key


@dataclass(slots=True)
class PreparedRungs:
    """The work of n rows on one rung of the job's ladder, as Prepared has that of their first attempts. A row without
    such work has parameter -1."""

    params_of: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    keys: bytes


class OwnTexts(NamedTuple):
    """The texts of n rows that say how their answers are read: tools as `known_tools` writes them, or labels as a JSON
    list. `texts` are distinct; `of` says where each row's stands in that list, plus 1; 0: it has none. Where no row has
    any, nothing is said of rows."""

    texts: list[str]
    of: NDArray[np.int32]

    @classmethod
    def found(cls, numbers: dict[str, int], of: NDArray[np.int32]) -> OwnTexts:
        """Return texts numbered from 1."""
        return cls(list(numbers), of) if numbers else NO_TEXTS


NO_TEXTS = OwnTexts([], np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class FurtherPrompts:
    """Prompts of rows that want answers to several, behind the first of each: `rows` (m,) says whose each is, in order;
    `counts` (m,) how many of the `tokens`, which lie end to end, are its. Parameters are those of the first."""

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
    """The prompts of n rows, ready for the index. An error row has count 0, a zero key and parameter 0.

    `tokens` are the prompts end to end; `params` lists distinct parameters, `params_of` (n,) points into it;
    `max_tokens` (n,), `counts` (n,). `openings` (n,) say whether prompts have begun the reasoning of their answers;
    `unread` are arguments that the chat template does not read, and in how many rows; `rungs` the further attempts;
    `own_texts` what rows say of how their answers are read. `samples` (n,) are the numbers of answers that rows ask for
    themselves, 0 where a row asks for none; None: no row asks. Those of a row with `further` prompts are of one prompt
    each. `dimensions` (n,) are those of the vectors that rows ask for, 0 where a row does not say; None: no row does.

    `known`: an earlier run prepared these rows, and their answers are stored: `tokens` is empty.
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
        """Return how many token ids of each row there are."""
        return np.zeros(len(self), np.int64) if self.known else self.counts.astype(np.int64)

    def answers(self, usual: int) -> NDArray[np.int64]:
        """Return how many answers each row gets, where a row that asks for no number gets the `usual` one."""
        if self.samples is None:
            return np.full(len(self), usual, np.int64)
        return np.where(self.samples > 0, self.samples, usual).astype(np.int64)

    def keys_of_new_work(self) -> bytes:
        """Return the keys of the rows whose tokens are there: error rows have none, and the answers of known ones are
        stored."""
        first = np.frombuffer(self.keys, np.uint8).reshape(-1, 32)[self.tokens_there() > 0].tobytes()
        return first + self.further.keys


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Rows that were read: their prompts, and all else that the index keeps of them."""

    prompts: Prepared
    facts: RowFacts

    def __len__(self) -> int:
        return len(self.prompts)
