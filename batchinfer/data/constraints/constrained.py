"""Answers that follow a grammar, for the engine: compiled grammars, masks of a whole batch, forced tokens.

llguidance is loaded with the first constraint: most jobs have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import ConstraintFailed, RowError
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.constraints.kept_grammars import KeptGrammars
from batchinfer.machine.cpus import usable_cpus

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from batchinfer.data.constraints.grammar_tokenizer import GrammarTokenizer
    from batchinfer.data.tokenizer.tokenizer import Tokenizer


def grammar_constraints(tokenizer: Tokenizer) -> Callable[[Collection[int], int], GrammarConstraints]:
    """Return a function that makes the constraints of models with this tokenizer. Ids beyond its vocabulary end no
    answer: llguidance refuses them."""
    definition, known = tokenizer.definition, tokenizer.rust.get_vocab_size(with_added_tokens=True)
    return lambda eos, vocab: GrammarConstraints(
        definition, [one for one in eos if one < known], vocab, usable_cpus()
    )


class GrammarConstraint:
    """One answer's state. It copies its grammar with its first token: many rows wait for their turn."""

    __slots__ = ("_matcher", "_own", "_problem", "_tokenizer", "begun")

    def __init__(self, compiled: LLMatcher, tokenizer: GrammarTokenizer) -> None:
        self._matcher, self._own, self._tokenizer = compiled, False, tokenizer
        self._problem: str | None = None
        self.begun = False  # whether it has taken a token

    @property
    def ended(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def failure(self) -> RowError | None:
        if self._matcher.is_error():
            return _row_error(self._matcher.get_error())
        return _row_error(self._problem) if self._problem is not None else None

    def take(self, token: int) -> None:
        if not self.matcher.consume_token(token):
            raise ConstraintFailed(self.failure or _row_error("a token came that may not come next"))
        self.begun = True

    def allows(self, token: int) -> bool:
        # to ask for a token that the tokenizer lacks would end the answer
        return self._tokenizer.asks_one(token, self.begun) and bool(self._matcher.validate_tokens([token]))

    def jump_forward(self) -> Seq[int]:
        tokens = self._matcher.compute_ff_tokens()
        if not tokens or not (self.begun or self._tokenizer.begins(tokens[0])):
            return ()
        return list(takewhile(self._tokenizer.gives, tokens))

    def end_here(self) -> None:
        """No token of the model may come next."""
        self._problem = "no token of the model can continue the answer"
        if not self.begun and self._tokenizer.drops_space:
            self._problem += (
                "; it may have to begin with a space, which decoding leaves out with this tokenizer"
            )

    @property
    def matcher(self) -> LLMatcher:
        """Its own, which may be changed."""
        if not self._own:
            self._matcher, self._own = self._matcher.deep_copy(), True
        return self._matcher


class GrammarConstraints:
    """The constraints of an engine's requests, as batchinfer.engine.schedule.constraints.Constraints describes them.
    `eos`: the tokens that end an answer; `vocab`: the number of the model's tokens; `threads`: how many fill masks."""

    def __init__(self, definition: str, eos: Collection[int], vocab: int, threads: int) -> None:
        self.work = ConstraintWork()
        self._definition, self._eos, self._vocab, self._threads = definition, eos, vocab, threads
        self._kept = KeptGrammars()

    @cached_property
    def _tokenizer(self) -> GrammarTokenizer:
        from batchinfer.data.constraints.grammar_tokenizer import GrammarTokenizer

        return GrammarTokenizer.of(self._definition, self._eos, self._vocab)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self._threads)

    def start(self, params: SamplingParams) -> GrammarConstraint:
        began = time.perf_counter()
        constraint = GrammarConstraint(self._grammar(params), self._tokenizer)
        self.work.compile_s += time.perf_counter() - began
        return constraint

    def fill(self, constraints: Seq[GrammarConstraint], bits: NDArray[np.int32]) -> None:
        began = time.perf_counter()
        # a model may have more logits than its tokenizer has tokens
        known = self._tokenizer.words
        masks = np.zeros((len(constraints), known), np.int32)
        rows = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        self._narrow(constraints, masks)
        words = min(known, bits.shape[1])
        bits[:, :words], bits[:, words:] = masks[:, :words], 0
        for row, constraint in enumerate(constraints):
            if constraint.failure is not None:
                bits[row] = 0
        self.work.mask_s += time.perf_counter() - began

    def _narrow(self, constraints: Seq[GrammarConstraint], masks: NDArray[np.int32]) -> None:
        """Leave out what the model does not give, and what would not be read as it stands in the grammar."""
        given, first = self._tokenizer.given, self._tokenizer.first
        if given is not None:
            masks &= given
        if first is not None:
            masks[[not constraint.begun for constraint in constraints]] &= first
        for row in np.flatnonzero(
            masks.view(np.uint32).max(1) == 0
        ).tolist():  # a tenth of the time that `any` takes
            constraints[row].end_here()

    def _grammar(self, params: SamplingParams) -> LLMatcher:
        """Compiled, perhaps for a row before."""
        from batchinfer.data.constraints.grammar import BadConstraint, compiled

        found = self._kept.find(params)
        if found is None:
            try:
                found = compiled(params, self._tokenizer.library)
            except BadConstraint as error:
                raise ConstraintFailed(_row_error(str(error))) from None
            self._kept.add(params, found)
        return found


def _row_error(problem: str) -> RowError:
    from batchinfer.data.constraints.constraint_wording import shown

    return RowError("constraint_failed", "policy", f"the constraint cannot be followed: {shown(problem)}")
