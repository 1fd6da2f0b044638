"""Rows under `max_tokens: fit`: the bound of each one's constraint becomes its max_tokens."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.input.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.input.constraints.per_constraint import PerConstraint
from batchinfer.input.rows import RowProblem


class Fits:
    """Bounds each constraint once. `reasoning`: of the checkpoint, which may come before every answer."""

    def __init__(self, reasoning: Reasoning | None = None) -> None:
        self._bounds, self._reasoning = PerConstraint(_bound), reasoning

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """`params` with the most tokens that their answer can need. Raises RowProblem where there is no bound."""
        found = self._bounds.of(params)
        if isinstance(found, str):
            raise RowProblem("bad_parameter", f"max_tokens is fit: {found}")
        most = with_reasoning(found, params.thinking_budget, self._reasoning)
        return replace(params, max_tokens=max(most, params.min_tokens))


def with_reasoning(most: int, budget: int | None, reasoning: Reasoning | None) -> int:
    """Return the most tokens of an answer of at most `most` tokens with the reasoning before it, which nothing but the
    context limits where it has no budget."""
    if reasoning is None or reasoning.tokens is None:
        return most
    return INT32_MAX if budget is None else min(INT32_MAX, most + budget + sum(map(len, reasoning.tokens)))


def _bound(params: SamplingParams) -> int | str:
    """The bound, or why there is none."""
    try:
        return most_tokens(params)
    except Unbounded as error:
        return str(error)
