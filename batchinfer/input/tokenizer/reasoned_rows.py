"""Adapts sampling parameters to reasoning that precedes the answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.tokenizer.reasoning_styles import PromptEnds, ReasoningOpenings, marks_before_calls
from batchinfer.input.tokenizer.tokenizer import Tokenizer


class ReasonedRows:
    """Adapts the sampling parameters of rows to the reasoning that precedes an answer.

    Some chat templates begin or end the reasoning already in the prompt.

    Args:
        reasoning: How the checkpoint marks its reasoning, or None if it does not reason.
        tokenizer: The tokenizer of the checkpoint.
    """

    def __init__(self, reasoning: Reasoning | None, tokenizer: Tokenizer) -> None:
        self._reasoning = reasoning
        tokens = None if reasoning is None else reasoning.tokens
        self._ends = None if tokens is None else PromptEnds(tokens, tokenizer)
        self._calls = None if reasoning is None else marks_before_calls(reasoning, tokenizer)
        self._last: tuple[SamplingParams, int, SamplingParams] | None = None

    def openings(self, tokens: TokenIds, counts: TokenIds) -> ReasoningOpenings:
        """Return how each prompt ends: OPEN within reasoning, CLOSED after reasoning, else NO_MARKER. Shape (prompts,).

        Args:
            tokens: The concatenated prompts.
            counts: The number of tokens of each prompt, shape (prompts,).
        """
        return np.zeros(len(counts), np.int8) if self._ends is None else self._ends.of(tokens, counts)

    def params(self, params: SamplingParams, opening: int) -> SamplingParams:
        """Return the sampling parameters of a row, adapted to how its prompt ends.

        If the answer may reason, a constraint only applies after the reasoning. Otherwise the limit on reasoning tokens
        (`thinking_budget`) is removed.

        Args:
            params: The parameters of the row.
            opening: How the prompt ends: NO_MARKER, OPEN or CLOSED.
        """
        if self._ends is None or (params.constraint is None and params.thinking_budget is None):
            return params
        last = self._last
        if last is None or last[0] is not params or last[1] != opening:
            self._last = last = params, opening, self._after_reasoning(params, opening)
        return last[2]

    def _after_reasoning(self, params: SamplingParams, opening: int) -> SamplingParams:
        marks = None if self._reasoning is None else self._reasoning.tokens_after(opening)
        if marks is None:
            return replace(params, thinking_budget=None)
        if params.tool_call is not None and self._calls is not None:
            marks = self._calls._replace(begin=marks.begin)
        return replace(params, after_reasoning=tuple(marks))
