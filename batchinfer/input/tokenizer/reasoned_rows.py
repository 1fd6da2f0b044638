"""Rows whose answers reason first: what their prompts make of their parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.tokenizer.reasoning_styles import Openings, PromptEnds, marks_before_calls
from batchinfer.input.tokenizer.tokenizer import Tokenizer


class ReasonedRows:
    """Says of prompts whether they have begun the reasoning of their answers, and gives their rows the parameters that
    follow from it. `reasoning`: of the checkpoint; None: it has none."""

    def __init__(self, reasoning: Reasoning | None, tokenizer: Tokenizer) -> None:
        self._reasoning = reasoning
        tokens = None if reasoning is None else reasoning.tokens
        self._ends = None if tokens is None else PromptEnds(tokens, tokenizer)
        self._calls = None if reasoning is None else marks_before_calls(reasoning, tokenizer)
        self._last: tuple[SamplingParams, int, SamplingParams] | None = None

    def openings(self, tokens: TokenIds, counts: TokenIds) -> Openings:
        """Return how each of some prompts ends, which lie end to end."""
        return np.zeros(len(counts), np.int8) if self._ends is None else self._ends.of(tokens, counts)

    def params(self, params: SamplingParams, opening: int) -> SamplingParams:
        """Return the parameters of a row whose prompt ends so: its constraint begins behind the reasoning, which its
        budget limits. Where there is no reasoning, a budget changes nothing."""
        if self._ends is None or (params.constraint is None and params.thinking_budget is None):
            return params
        last = self._last
        if last is None or last[0] is not params or last[1] != opening:
            self._last = last = params, opening, self._behind(params, opening)
        return last[2]

    def _behind(self, params: SamplingParams, opening: int) -> SamplingParams:
        marks = None if self._reasoning is None else self._reasoning.tokens_after(opening)
        if marks is None:
            return replace(params, thinking_budget=None)
        if params.tool_call is not None and self._calls is not None:
            marks = self._calls._replace(begin=marks.begin)
        return replace(params, after_reasoning=tuple(marks))
