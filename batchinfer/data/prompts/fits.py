"""Rows under `max_tokens: fit`: the bound of each one's constraint becomes its max_tokens."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.data.input.rows import RowProblem
from batchinfer.data.prompts.answer_bound import Unbounded, most_tokens
from batchinfer.request import SamplingParams

KEPT = 1024  # bounds that are remembered


class Fits:
    """Bounds each constraint once."""

    def __init__(self) -> None:
        self._known: dict[bytes, int | str] = {}

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """`params` with the most tokens that their answer can need. Raises RowProblem where there is no bound."""
        found = self._bound(params)
        if isinstance(found, str):
            raise RowProblem("bad_parameter", f"max_tokens is fit: {found}")
        return replace(params, max_tokens=max(found, params.min_tokens))

    def _bound(self, params: SamplingParams) -> int | str:
        """The bound, or why there is none."""
        key = params.constraint_digest
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            try:
                self._known[key] = most_tokens(params)
            except Unbounded as error:
                self._known[key] = str(error)
        return self._known[key]
