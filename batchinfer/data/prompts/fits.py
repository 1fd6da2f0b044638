"""Rows under `max_tokens: fit`: the bound of each one's constraint becomes its max_tokens."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.sampling import SamplingParams
from batchinfer.data.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.data.constraints.per_constraint import PerConstraint
from batchinfer.data.input.rows import RowProblem


class Fits:
    """Bounds each constraint once."""

    def __init__(self) -> None:
        self._bounds = PerConstraint(_bound)

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """`params` with the most tokens that their answer can need. Raises RowProblem where there is no bound."""
        found = self._bounds.of(params)
        if isinstance(found, str):
            raise RowProblem("bad_parameter", f"max_tokens is fit: {found}")
        return replace(params, max_tokens=max(found, params.min_tokens))


def _bound(params: SamplingParams) -> int | str:
    """The bound, or why there is none."""
    try:
        return most_tokens(params)
    except Unbounded as error:
        return str(error)
