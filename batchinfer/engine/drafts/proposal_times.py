"""Estimates how long a draft model takes to propose tokens."""

from __future__ import annotations

from functools import lru_cache

from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

_NEWEST = 0.2  # weight of the newest step in a moving average
_REMEMBERED = 1024  # step shapes in the cache of bounds


class ProposalTimes:
    """Estimates how long a step of a draft model takes: its roofline times a measured ratio.

    The ratio of duration to roofline is a moving average over steps of similar size.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the draft model.
        peaks: The peak FLOP/s and bandwidth of the device.
    """

    def __init__(self, cost: ModelCost, peaks: Peaks) -> None:
        self._ratios: dict[int, float] = {}  # measured duration / bound, by the bit length of a step's tokens
        self._layers = len(cost.windows)
        self._bound = lru_cache(_REMEMBERED)(lambda shape: roofline_seconds(cost.step(shape), peaks))

    def seconds(self, tokens: float, rows: int, context: float) -> float:
        """Return the estimated duration of a step of the draft model in seconds.

        Args:
            tokens: The total number of tokens of all rows of the step.
            rows: The number of rows.
            context: The mean context length in tokens.
        """
        return self._least_s(tokens, rows, context) * self._ratio(round(tokens).bit_length())

    def record_time(self, tokens: int, rows: int, context: float, took_s: float) -> None:
        """Learn from the measured duration of a step of the draft model.

        Args:
            tokens: The total number of tokens of all rows of the step.
            rows: The number of rows.
            context: The mean context length in tokens.
            took_s: The duration in seconds.
        """
        level = tokens.bit_length()
        found, before = took_s / self._least_s(tokens, rows, context), self._ratios.get(level)
        # Limit the influence of a single step that was delayed by something else
        self._ratios[level] = (
            found if before is None else before + _NEWEST * (min(found, 2 * before) - before)
        )

    def _least_s(self, tokens: float, rows: int, context: float) -> float:
        run, seen = max(1, _rounded(tokens)), _rounded(context) * self._layers
        return self._bound(StepShape(run, rows, run * seen, rows * seen))

    def _ratio(self, level: int) -> float:
        ratios = self._ratios
        return ratios[min(ratios, key=lambda other: (abs(other - level), other))] if ratios else 1.0


def _rounded(count: float) -> int:
    rounded = round(count)
    shift = max(0, rounded.bit_length() - 4)
    return rounded >> shift << shift
