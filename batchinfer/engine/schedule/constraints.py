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
        """True if the answer would be incomplete, and an error, if it ended now."""

    @property
    def over(self) -> bool:
        """True if all tokens are allowed from now on. The caller must drop the constraint then."""

    @property
    def failure(self) -> RowError | None:
        """Why the constraint cannot be followed further, or None if it can."""

    def take(self, token: int) -> None:
        """Advance the state by the next token of the answer.

        Raises:
            ConstraintFailed: If the token is not allowed.
        """

    def allows(self, token: int) -> bool:
        """Return True if a token is certainly allowed next. False: it is forbidden, or only a token mask can tell.

        It must be called after all forced tokens were taken.

        Args:
            token: The token.
        """

    def fork(self) -> Constraint:
        """Return an independent copy of the state, to try further tokens."""

    def jump_forward(self) -> Seq[int]:
        """Return the tokens that must come next because the constraint leaves no choice. The state does not change.

        The result is empty if the next token is not determined.
        """


class Constraints(Protocol):
    """Creates the constraints of answers, and computes the token masks of several answers at once."""

    @property
    def work(self) -> ConstraintWork:
        """The time spent on constraints so far. The object changes when further time is spent."""

    def start(self, params: SamplingParams) -> Constraint:
        """Return the constraint of an answer before its first token.

        Args:
            params: The sampling parameters with the constraint's definition.

        Raises:
            ConstraintFailed: If the constraint cannot be compiled.
        """

    def fill(self, constraints: Seq[Any], bits: NDArray[np.int32]) -> None:
        """Write the token masks of n answers.

        Args:
            constraints: The constraint of each answer. A failed constraint allows no token.
            bits: int32 [n, words], overwritten. Bit t % 32 of word t // 32 is set if token t may come next.
        """


# Creates the constraints of a model from its EOS tokens and the size of its vocabulary
ConstraintsFor = Callable[[Collection[int], int], Constraints]


class ConstraintMasks:
    """The states of constraints whose token masks are needed in steps. Step plans refer to a mask by its number."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._held: dict[int, Constraint] = {}
        self._numbered = 0

    def put(self, constraint: Constraint) -> int:
        """Store the state of a constraint, and return the number by which step plans refer to its mask."""
        self._numbered += 1
        self._held[self._numbered] = constraint
        return self._numbered

    def drop(self, number: int) -> None:
        """Delete the constraint with a mask number. No later step plan may refer to the number."""
        del self._held[number]

    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        """Check single tokens against masks without computing the whole masks.

        Args:
            masks: The numbers of n masks.
            tokens: One token per mask.

        Returns:
            [n], True if the mask certainly allows the token. False: it forbids the token, or only `fill` can tell.
        """
        began = time.perf_counter()
        held = self._held
        found = [held[mask].allows(token) for mask, token in zip(masks, tokens, strict=True)]
        self.constraints.work.mask_s += time.perf_counter() - began
        return found

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        """Write whole token masks.

        Args:
            masks: The numbers of n masks.
            bits: int32 [n, words], overwritten. Bit t % 32 of word t // 32 is set if token t may come next.
        """
        self.constraints.fill([self._held[mask] for mask in masks], bits)
