"""Constraints of a batch for the engine: compiled grammars, masks and forced tokens.

llguidance is imported with the first constraint, since most jobs have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import ConstraintFailed
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.after_reasoning import FreeMasks, ReasonedConstraint
from batchinfer.input.constraints.grammar_cache import GrammarCache
from batchinfer.input.constraints.grammar_constraint import GrammarConstraint, row_error
from batchinfer.machine.cpus import usable_cpus

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from batchinfer.input.constraints.grammar_tokenizer import GrammarTokenizer
    from batchinfer.input.tokenizer.tokenizer import Tokenizer


def grammar_constraints(tokenizer: Tokenizer) -> Callable[[Collection[int], int], GrammarConstraints]:
    """Return a function that makes the GrammarConstraints of an engine whose model uses this tokenizer.

    The function's arguments are the ids of the model's end tokens and its number of logits per token. End tokens
    outside the tokenizer's vocabulary are ignored, since llguidance rejects them.
    """
    definition, tokens = tokenizer.definition, tokenizer.rust.get_vocab_size(with_added_tokens=True)
    return lambda eos, vocab: GrammarConstraints(
        definition, [one for one in eos if one < tokens], vocab, usable_cpus()
    )


RowConstraint = GrammarConstraint | ReasonedConstraint


class GrammarConstraints:
    """The constraints of an engine's requests. Implements `Constraints` of batchinfer.engine.schedule.constraints.

    Args:
        definition: The tokenizer as the text of a tokenizer.json.
        eos: The ids of the tokens that end an answer.
        vocab: The number of token ids of the model.
        threads: The number of threads that compute masks.
    """

    def __init__(self, definition: str, eos: Collection[int], vocab: int, threads: int) -> None:
        self.work = ConstraintWork()
        self._definition, self._eos, self._vocab, self._threads = definition, eos, vocab, threads
        self._free = FreeMasks(vocab, eos)
        self._kept = GrammarCache()

    @cached_property
    def _tokenizer(self) -> GrammarTokenizer:
        from batchinfer.input.constraints.grammar_tokenizer import GrammarTokenizer

        return GrammarTokenizer.of(self._definition, self._eos, self._vocab)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self._threads)

    def start(self, params: SamplingParams) -> RowConstraint:
        """Return the state of a new answer under the constraint of `params`, before its first token.

        Raises:
            ConstraintFailed: The constraint cannot be compiled.
        """
        began = time.perf_counter()
        marks, budget, grammar = params.reasoning, params.thinking_budget, None
        if params.constraint is not None or marks is None:
            grammar = GrammarConstraint(self._grammar(params), self._tokenizer)
            self.work.compile_s += time.perf_counter() - began
            if marks is None:
                return grammar
        return ReasonedConstraint(marks, grammar, self._free, budget)

    def fill(self, constraints: Seq[RowConstraint], bits: NDArray[np.int32]) -> None:
        """Write one mask per answer: the tokens that may come next in the answer.

        Args:
            constraints: The states of the answers.
            bits: The masks to write, shape (answers, words). Each set bit of a 32-bit word allows one token id.
        """
        began = time.perf_counter()
        followed = [
            (row, found) for row, one in enumerate(constraints) if (found := one.followed) is not None
        ]
        if followed:
            masks = self._masks([one for _, one in followed], bits.shape[1])
            bits[[row for row, _ in followed]] = masks
        for row, one in enumerate(constraints):
            if isinstance(one, ReasonedConstraint):
                one.write(bits[row])
        self.work.mask_s += time.perf_counter() - began

    def _masks(self, constraints: Seq[GrammarConstraint], words: int) -> NDArray[np.int32]:
        # A model may have more logits than its tokenizer has tokens
        own_words = self._tokenizer.words
        masks = np.zeros((len(constraints), own_words), np.int32)
        rows = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        self._executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        self._narrow(constraints, masks)
        for row, constraint in enumerate(constraints):
            if constraint.failure is not None:
                masks[row] = 0
        return masks[:, :words] if own_words >= words else np.pad(masks, ((0, 0), (0, words - own_words)))

    def _narrow(self, constraints: Seq[GrammarConstraint], masks: NDArray[np.int32]) -> None:
        # Decoding removes the space of some first tokens, so these are excluded at the start of an answer
        given, first = self._tokenizer.given, self._tokenizer.first
        if given is not None:
            masks &= given
        if first is not None:
            masks[[not constraint.begun for constraint in constraints]] &= first
        empty = masks.view(np.uint32).max(1) == 0  # takes a tenth of the time of `any`
        for row in np.flatnonzero(empty).tolist():
            constraints[row].mark_failed()

    def _grammar(self, params: SamplingParams) -> LLMatcher:
        from batchinfer.input.constraints.grammar import BadConstraint, compile_constraint

        found = self._kept.find(params)
        if found is None:
            try:
                found = compile_constraint(params, self._tokenizer.library)
            except BadConstraint as error:
                raise ConstraintFailed(row_error(str(error))) from None
            self._kept.add(params, found)
        return found
