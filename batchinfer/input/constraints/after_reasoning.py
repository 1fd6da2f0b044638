"""Constraints that begin after the reasoning, and token budgets of reasoning."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.reasoning import Ids, ReasoningTokens, partial_marker_length
from batchinfer.core.request import RowError
from batchinfer.input.constraints.grammar_constraint import GrammarConstraint

BITS = 32  # bits per word of a mask, see batchinfer_kernels.mask


class Phase(Enum):
    """How far an answer is that may begin with reasoning: first tokens, reasoning, marker after it, or final text."""

    BEGINNING = auto()  # the first tokens, which show if the answer reasons
    REASONING = auto()
    GAP = auto()  # the tokens between the reasoning and a constrained answer
    ANSWER = auto()


class FreeMasks:
    """The token masks for the parts of an answer that no constraint restricts. A mask has one bit per token id.

    Args:
        vocab: The number of token ids of the model.
        eos: The ids of the model's end tokens.
    """

    def __init__(self, vocab: int, eos: Collection[int]) -> None:
        self.eos = frozenset(eos)
        self._vocab = vocab

    @cached_property
    def all(self) -> NDArray[np.int32]:
        """The mask (one bit per token id) that allows all tokens of the model."""
        return self._mask(frozenset())

    @cached_property
    def without_end_tokens(self) -> NDArray[np.int32]:
        """The mask (one bit per token id) that allows all tokens of the model except its end tokens."""
        return self._mask(self.eos)

    def _mask(self, without: Collection[int]) -> NDArray[np.int32]:
        bits = np.zeros(-(-self._vocab // BITS) * BITS, np.uint8)
        bits[: self._vocab] = 1
        bits[[token for token in without if token < self._vocab]] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


class ReasonedConstraint:
    """The state of one answer whose model may reason first, and whose text after the reasoning may have a constraint.

    Args:
        marks: The token sequences that begin and end the reasoning and the text after it.
        inner: The constraint of the text after the reasoning, or None.
        free: The masks of tokens without a constraint.
        budget: The maximum number of reasoning tokens, after which the end of the reasoning is forced. None: no limit.
    """

    __slots__ = ("_budget", "_count", "_free", "_inner", "_marks", "_phase", "_taken")

    def __init__(
        self,
        marks: ReasoningTokens,
        inner: GrammarConstraint | None,
        free: FreeMasks,
        budget: int | None = None,
    ) -> None:
        self._marks, self._inner, self._free, self._budget = marks, inner, free, budget
        self._phase = Phase.BEGINNING if marks.begin else Phase.REASONING
        self._taken: list[int] = []  # the last tokens of the current phase
        self._count = 0  # number of reasoning tokens

    @property
    def ended(self) -> bool:
        """True if the answer is complete under its constraint, so that only an end token can follow."""
        return self._reached is not None and self._reached.ended

    @property
    def failure(self) -> RowError | None:
        """The error of a row whose constraint cannot be followed, or None."""
        return None if self._reached is None else self._reached.failure

    @property
    def needs_end(self) -> bool:
        """True if the answer is invalid when it is truncated at its token limit: it has a constraint."""
        return self._inner is not None

    @property
    def over(self) -> bool:
        """True if the reasoning has ended and no constraint follows: from now on, all tokens are allowed."""
        return self._phase is Phase.ANSWER and self._inner is None

    @property
    def followed(self) -> GrammarConstraint | None:
        """The constraint that determines the mask of the next token.

        None while the model reasons, or without a constraint.
        """
        direct = self._phase is Phase.BEGINNING and not self._marks.answer and not self._taken
        return self._inner if direct or self._phase is Phase.ANSWER else None

    @property
    def _reached(self) -> GrammarConstraint | None:
        return self._inner if self._phase is Phase.ANSWER else None

    def take(self, token: int) -> None:
        """Add the next generated token of the answer to its state."""
        if self._phase is Phase.ANSWER:
            if self._inner is not None:
                self._inner.take(token)
            return
        self._taken.append(token)
        if self._phase is Phase.BEGINNING:
            self._begin(token)
        elif self._phase is Phase.REASONING:
            self._reason()
        elif len(self._taken) == len(self._marks.gap):
            self._enter(Phase.ANSWER)

    def allows(self, token: int) -> bool:
        """Return True if this token may be the next token of the answer."""
        forced = self._forced()
        if forced:
            return token == forced[0]
        if self._phase is Phase.BEGINNING and token in self._next_marks():
            return True
        if self._phase is Phase.REASONING:
            return self._inner is None or token not in self._free.eos
        followed = self.followed
        return self._inner is None if followed is None else followed.allows(token)

    def fork(self) -> ReasonedConstraint:
        """Return an independent copy of the state of the answer."""
        inner = None if self._inner is None else self._inner.fork()
        own = ReasonedConstraint(self._marks, inner, self._free, self._budget)
        own._phase, own._count, own._taken = self._phase, self._count, [*self._taken]
        return own

    def jump_forward(self) -> Sequence[int]:
        """Return the next tokens of the answer for which the model has no choice. They are not added to the state.

        Empty if the model can choose the next token.
        """
        forced = self._forced()
        if self._inner is None or (self._phase is Phase.BEGINNING and not self._answers(forced)):
            return forced
        if not forced and self._phase is not Phase.ANSWER:
            return ()
        gap = self._marks.gap if self._phase is Phase.REASONING else ()
        return (*forced, *gap, *self._inner.jump_forward())

    def write(self, bits: NDArray[np.int32]) -> None:
        """Write into `bits` which tokens may come next in the answer.

        If `followed` is not None, the caller has already written the mask of that constraint to `bits`.

        Args:
            bits: One bit per token id, in 32-bit words. A set bit allows the token.
        """
        forced = self._forced()
        if self._phase is Phase.ANSWER and self._inner is not None:
            return
        if self._inner is None or (self._phase is Phase.REASONING and not forced):
            free = self._free.all if self._inner is None else self._free.without_end_tokens
            words = min(len(bits), len(free))
            bits[:words], bits[words:] = free[:words], 0
        elif self.followed is None:
            bits[:] = 0
        if forced:
            bits[:] = 0
        for token in forced[:1] or self._next_marks():
            bits.view(np.uint32)[token // BITS] |= np.uint32(1 << token % BITS)

    def _forced(self) -> Ids:
        if self._phase is Phase.GAP:
            return self._marks.gap[len(self._taken) :]
        if self._phase is Phase.REASONING and self._budget is not None and self._count >= self._budget:
            return self._marks.end[partial_marker_length(self._taken, self._marks.end) :]
        if self._phase is Phase.BEGINNING and self._inner is not None and self.followed is None:
            marks = [mark[len(self._taken) :] for mark in self._possible()]
            return _common(marks)
        return ()

    def _possible(self) -> list[Ids]:
        given = tuple(self._taken)
        return [
            mark for mark in (self._marks.begin, self._marks.answer) if mark and mark[: len(given)] == given
        ]

    def _next_marks(self) -> set[int]:
        if self._phase is not Phase.BEGINNING:
            return set()
        return {mark[len(self._taken)] for mark in self._possible()}

    def _answers(self, forced: Ids) -> bool:
        return bool(forced) and (*self._taken, *forced) == self._marks.answer

    def _begin(self, token: int) -> None:
        given = tuple(self._taken)
        if given == self._marks.begin:
            self._enter(Phase.REASONING)
        elif given == self._marks.answer:
            self._enter(Phase.ANSWER)
        elif not self._possible():
            self._enter(Phase.ANSWER)
            if self._inner is not None:
                self._inner.take(token)

    def _reason(self) -> None:
        self._count += 1
        closing = self._marks.closing
        if tuple(self._taken[-len(closing) :]) == closing:
            gap = self._inner is not None and self._marks.gap
            self._enter(Phase.GAP if gap else Phase.ANSWER)
        else:
            del self._taken[: -len(self._marks.end)]

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._taken.clear()


def _common(marks: Sequence[Ids]) -> Ids:
    first, last = min(marks), max(marks)
    return first[: next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]
