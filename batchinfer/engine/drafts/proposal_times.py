"""Says how long a draft model beside the job's takes to propose: by its costs, corrected by how long it took."""

from __future__ import annotations

from functools import lru_cache

from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

_NEWEST = 0.2  # the weight of the newest step
_REMEMBERED = 1024  # shapes


class ProposalTimes:
    """The roofline bound of a step, times how much longer than theirs steps of about as many tokens took."""

    def __init__(self, cost: ModelCost, peaks: Peaks) -> None:
        self._ratios: dict[int, float] = {}  # by the power of two of a step's tokens
        self._layers = len(cost.windows)
        self._bound = lru_cache(_REMEMBERED)(lambda shape: roofline_seconds(cost.step(shape), peaks))

    def seconds(self, tokens: float, rows: int, context: float) -> float:
        """Return the seconds of a step in which so many rows run so many tokens in all, for contexts of so many tokens
        in the mean."""
        return self._least_s(tokens, rows, context) * self._ratio(round(tokens).bit_length())

    def measured(self, tokens: int, rows: int, context: float, took_s: float) -> None:
        """Take the time of a step."""
        level = tokens.bit_length()
        found, before = took_s / self._least_s(tokens, rows, context), self._ratios.get(level)
        # One that had to wait for something else says little about the others
        self._ratios[level] = (
            found if before is None else before + _NEWEST * (min(found, 2 * before) - before)
        )

    def _least_s(self, tokens: float, rows: int, context: float) -> float:
        run, seen = max(1, _rounded(tokens)), _rounded(context) * self._layers
        return self._bound(StepShape(run, rows, run * seen, rows * seen))

    def _ratio(self, level: int) -> float:
        """Return the ratio of such steps, of the nearest level; 1 where nothing was measured."""
        ratios = self._ratios
        return ratios[min(ratios, key=lambda other: (abs(other - level), other))] if ratios else 1.0


def _rounded(count: float) -> int:
    """Keep the four leading bits of a number, so that shapes repeat."""
    whole = round(count)
    cut = max(0, whole.bit_length() - 4)
    return whole >> cut << cut
