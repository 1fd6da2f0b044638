"""The protocols of constraints: which tokens an answer may have next. Implementations are in `batchinfer.input`."""

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
    """The state of a constraint after the tokens of an answer so far."""

    @property
    def ended(self) -> bool:
        """True if the answer is complete and no token may follow."""

    @property
    def needs_end(self) -> bool:
        """True if the answer would be incomplete if it ended now."""

    @property
    def over(self) -> bool:
        """True if all tokens are allowed from now on. The constraint must not be queried again."""

    @property
    def failure(self) -> RowError | None:
        """The reason why the constraint cannot be followed further, if there is one."""

    def take(self, token: int) -> None:
        """Advance the state by the next token of the answer.

        Raises:
            ConstraintFailed: If the token is not allowed.
        """

    def allows(self, token: int) -> bool:
        """Return True if a token is known to be allowed next, after all forced tokens were taken.

        Every tokenization of a forced text is accepted, while a mask allows only one. The result is also False if only
        a mask can tell.
        """

    def fork(self) -> Constraint:
        """Return an independent copy of the state, to try further tokens."""

    def jump_forward(self) -> Seq[int]:
        """Return the next tokens of the answer that the constraint determines. The state does not change."""


class Constraints(Protocol):
    """Creates the constraints of answers, and computes the token masks of a batch."""

    @property
    def work(self) -> ConstraintWork:
        """The time spent on constraints so far. The returned object is updated as time is spent."""

    def start(self, params: SamplingParams) -> Constraint:
        """Return the constraint of an answer before its first token.

        Args:
            params: The sampling parameters with the constraint's definition.

        Raises:
            ConstraintFailed: If the constraint cannot be compiled.
        """

    def fill(self, constraints: Seq[Any], bits: NDArray[np.int32]) -> None:
        """Write the token masks of n rows.

        Args:
            constraints: The constraint of each row. A failed constraint allows no token.
            bits: int32 [n, words], overwritten. Bit t % 32 of word t // 32 is set if token t may come next.
        """


# Creates the constraints of a model from its EOS tokens and the size of its vocabulary
ConstraintsFor = Callable[[Collection[int], int], Constraints]


class ConstraintMasks:
    """The states of constraints for which step plans need token masks, by a number that plans refer to."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._held: dict[int, Constraint] = {}
        self._numbered = 0

    def put(self, constraint: Constraint) -> int:
        """Add the state of a constraint and return the number of its mask."""
        self._numbered += 1
        self._held[self._numbered] = constraint
        return self._numbered

    def drop(self, number: int) -> None:
        """Remove the constraint with a mask number, which no later step plan refers to."""
        del self._held[number]

    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        """Return for each mask whether its token is known to be allowed next.

        Args:
            masks: The numbers of the masks.
            tokens: One token per mask.

        Returns:
            False also for a token for which only the mask itself can tell.
        """
        began = time.perf_counter()
        held = self._held
        found = [held[mask].allows(token) for mask, token in zip(masks, tokens, strict=True)]
        self.constraints.work.mask_s += time.perf_counter() - began
        return found

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        """Write the token masks with some numbers.

        Args:
            masks: The numbers of n masks.
            bits: int32 [n, words], overwritten. Bit t % 32 of word t // 32 is set if token t may come next.
        """
        self.constraints.fill([self._held[mask] for mask in masks], bits)
