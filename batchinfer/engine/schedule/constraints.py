"""The protocol of what an answer must obey: which tokens may come next, and which must. It knows no grammar."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams


class Constraint(Protocol):
    """The state of one answer. It has taken every token of the answer so far."""

    @property
    def ended(self) -> bool:
        """Whether the answer is whole and nothing may follow it."""

    @property
    def needs_end(self) -> bool:
        """Whether an answer that something else ends is incomplete."""

    @property
    def over(self) -> bool:
        """Whether any tokens may follow, and it is not to be asked any more."""

    @property
    def failure(self) -> RowError | None:
        """The reason why it cannot be followed any further."""

    def take(self, token: int) -> None:
        """The answer's next token. Raises ConstraintFailed for one that may not come."""

    def allows(self, token: int) -> bool:
        """Whether this token may come next, when all that were forced are taken: a mask has one spelling of what is
        forced, and this has them all. False also where only the mask can say."""

    def fork(self) -> Constraint:
        """A state of its own, in which further tokens can be tried."""

    def jump_forward(self) -> Seq[int]:
        """The tokens that have to come next, as far as there is but one way on. They are not taken by this."""


class Constraints(Protocol):
    """Makes constraints, and fills the masks of a batch."""

    @property
    def work(self) -> ConstraintWork:
        """The seconds that they took so far; it counts on."""

    def start(self, params: SamplingParams) -> Constraint:
        """The constraint of an answer with no tokens yet. Raises ConstraintFailed where it cannot be compiled."""

    def fill(self, constraints: Seq[Any], bits: NDArray[np.int32]) -> None:
        """Say which tokens may come next: bit t % 32 of word t // 32, see batchinfer_kernels.mask.

        bits: (n, words) int32, a row for each constraint, written as a whole. One that failed gets no bit.
        """


# Makes them for a model: the tokens that end its answers, and how many tokens it knows.
ConstraintsFor = Callable[[Collection[int], int], Constraints]


class ConstraintMasks:
    """The constraints of the rows in flight, by the number under which plans name a row's mask."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._held: dict[int, Constraint] = {}
        self._numbered = 0

    def put(self, constraint: Constraint) -> int:
        """Hold a constraint, and return its number."""
        self._numbered += 1
        self._held[self._numbered] = constraint
        return self._numbered

    def drop(self, number: int) -> None:
        """Forget a constraint, whose row has ended."""
        del self._held[number]

    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        """Say of each mask whether this token may come next. False also where only `fill` can say."""
        began = time.perf_counter()
        held = self._held
        found = [held[mask].allows(token) for mask, token in zip(masks, tokens, strict=True)]
        self.constraints.work.mask_s += time.perf_counter() - began
        return found

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        """Clear the bits of the tokens that may not come next; see `Constraints.fill`."""
        self.constraints.fill([self._held[mask] for mask in masks], bits)
