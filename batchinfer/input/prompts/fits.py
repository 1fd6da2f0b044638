"""Sets max_tokens of rows under `max_tokens: fit` to the bound of their constraints."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.input.constraints.answer_bound import UnboundedAnswer, most_tokens
from batchinfer.input.constraints.per_constraint import PerConstraint
from batchinfer.input.rows import RowProblem


class ConstraintMaxTokens:
    """Sets `max_tokens` of requests to the length of the longest answer that their constraint allows.

    This implements `max_tokens: fit` in a job file. The length is computed once per constraint.

    Args:
        reasoning: How the checkpoint marks its reasoning, which may precede every answer, or None.
    """

    def __init__(self, reasoning: Reasoning | None = None) -> None:
        self._bounds, self._reasoning = PerConstraint(_bound), reasoning

    def with_max_tokens(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with `max_tokens` set to the number of tokens of the longest answer that they allow.

        Raises:
            RowProblem: The constraint of `params` allows answers of any length.
        """
        found = self._bounds.of(params)
        if isinstance(found, str):
            raise RowProblem("bad_parameter", f"max_tokens is fit: {found}")
        most = with_reasoning(found, params.thinking_budget, self._reasoning)
        return replace(params, max_tokens=max(most, params.min_tokens))


def with_reasoning(most: int, budget: int | None, reasoning: Reasoning | None) -> int:
    """Return the maximum number of tokens of an answer together with its reasoning.

    Args:
        most: The maximum number of tokens of the answer without reasoning.
        budget: The maximum number of tokens of the reasoning. None: only the context length limits it.
        reasoning: How the checkpoint marks its reasoning, or None if it does not reason.
    """
    if reasoning is None or reasoning.tokens is None:
        return most
    return INT32_MAX if budget is None else min(INT32_MAX, most + budget + sum(map(len, reasoning.tokens)))


def _bound(params: SamplingParams) -> int | str:
    try:
        return most_tokens(params)
    except UnboundedAnswer as error:
        return str(error)
