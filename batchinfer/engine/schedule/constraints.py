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
        """True if all tokens are allowed from now on, so the constraint must not be queried again."""

    @property
    def failure(self) -> RowError | None:
        """The reason why the constraint cannot be followed further, if there is one."""

    def take(self, token: int) -> None:
        """Advance by the next token of the answer.

        Raises:
            ConstraintFailed: If the token is not allowed.
        """

    def allows(self, token: int) -> bool:
        """Return True if a token may come next, after all forced tokens are taken.

        It accepts every tokenization of a forced text, while a mask has only one. It also returns False if only the
        mask can tell.
        """

    def fork(self) -> Constraint:
        """Return an independent copy of the state, to try further tokens."""

    def jump_forward(self) -> Seq[int]:
        """Return the tokens that are forced next. The state does not change."""


class Constraints(Protocol):
    """Creates constraints, and fills the masks of a batch."""

    @property
    def work(self) -> ConstraintWork:
        """The time that constraints took so far. The object continues to change."""

    def start(self, params: SamplingParams) -> Constraint:
        """Return the constraint of an answer without tokens.

        Raises:
            ConstraintFailed: If the constraint cannot be compiled.
        """

    def fill(self, constraints: Seq[Any], bits: NDArray[np.int32]) -> None:
        """Set the bits of all tokens that may come next; see batchinfer_kernels.mask.

        Args:
            constraints: The constraints of n rows. A failed constraint allows no token.
            bits: (n, words) int32, overwritten. Token t is bit t % 32 of word t // 32.
        """


# Creates the constraints of a model from its EOS tokens and the size of its vocabulary
ConstraintsFor = Callable[[Collection[int], int], Constraints]


class ConstraintMasks:
    """The constraints of running rows, by the number of their mask in step plans."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._held: dict[int, Constraint] = {}
        self._numbered = 0

    def put(self, constraint: Constraint) -> int:
        """Add a constraint and return its number."""
        self._numbered += 1
        self._held[self._numbered] = constraint
        return self._numbered

    def drop(self, number: int) -> None:
        """Remove a constraint whose row has ended."""
        del self._held[number]

    def allowed(self, masks: Seq[int], tokens: Seq[int]) -> list[bool]:
        """Return, for each mask, whether its token may come next. It is also False if only `fill` can tell.

        Args:
            masks: The numbers of the masks.
            tokens: One token per mask.
        """
        began = time.perf_counter()
        held = self._held
        found = [held[mask].allows(token) for mask, token in zip(masks, tokens, strict=True)]
        self.constraints.work.mask_s += time.perf_counter() - began
        return found

    def fill(self, masks: Seq[int], bits: NDArray[np.int32]) -> None:
        """Set the bits of all tokens that may come next; see `Constraints.fill`."""
        self.constraints.fill([self._held[mask] for mask in masks], bits)
