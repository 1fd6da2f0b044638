"""Constraints without a grammar: an answer is one of the texts of `choice`, whose letters are tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import ConstraintFailed, RowError
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams

FIRST = ord("a")  # the letter of token 0, which ends an answer


def word(tokens: Seq[int]) -> str:
    return "".join(chr(FIRST + token) for token in tokens)


@dataclass
class WordConstraint:
    words: frozenset[str]
    eos: int
    forces: bool
    said: str = ""
    closed: bool = False

    @property
    def next(self) -> set[int]:
        """Return the tokens that may come next."""
        if self.closed:
            return set()
        longer = {
            ord(w[len(self.said)]) - FIRST for w in self.words if w.startswith(self.said) and w != self.said
        }
        return longer | ({self.eos} if self.said in self.words else set())

    @property
    def ended(self) -> bool:
        return self.closed or self.next == {self.eos}

    @property
    def needs_end(self) -> bool:
        return True

    @property
    def over(self) -> bool:
        return False

    @property
    def failure(self) -> RowError | None:
        return None

    def take(self, token: int) -> None:
        if token not in self.next:
            raise ConstraintFailed(RowError("constraint_failed", "policy", f"{token} may not come"))
        if token == self.eos:
            self.closed = True
        else:
            self.said += chr(FIRST + token)

    def allows(self, token: int) -> bool:
        return token in self.next

    def fork(self) -> WordConstraint:
        return replace(self)

    def jump_forward(self) -> Seq[int]:
        at = WordConstraint(self.words, self.eos, True, self.said, self.closed)
        found: list[int] = []
        while self.forces and len(at.next) == 1 and not at.ended:
            (token,) = at.next
            at.take(token)
            found.append(token)
        return found


@dataclass
class WordConstraints:
    eos: int
    forces: bool = True  # whether tokens are appended that have to come
    work: ConstraintWork = field(default_factory=ConstraintWork)

    def start(self, params: SamplingParams) -> WordConstraint:
        if "fails" in params.choice:
            raise ConstraintFailed(RowError("constraint_failed", "policy", "it fails"))
        self.work.compile_s += 0.5
        return WordConstraint(frozenset(params.choice), self.eos, self.forces)

    def fill(self, constraints: Seq[WordConstraint], bits: NDArray[np.int32]) -> None:
        bits[:] = 0
        for constraint, words in zip(constraints, bits, strict=True):
            for token in constraint.next:
                words[token // 32] |= np.int32(1 << token % 32)
        self.work.mask_s += 0.25
