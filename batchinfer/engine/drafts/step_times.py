"""Estimates the device time of steps with and without drafts from roofline bounds and measured steps."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from functools import lru_cache
from statistics import median

from batchinfer.core.samples import StepSample
from batchinfer.engine.tensors.graph_sizes import GraphSteps
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

MIN_STEPS = 3  # a median of fewer steps is not robust against a single slow one
_KEPT = 31  # newest ratios per size
_NEWEST = 0.2  # weight of the newest step in a moving average
_FORGOTTEN = 0.01  # how far each step without drafts moves the ratios with drafts towards the ratios without
_REMEMBERED = 4096  # step shapes in the cache of bounds


class TypicalRatios:
    """The newest measured ratios of step duration to roofline, in one group per power of two of a step's tokens."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}

    def record_time(self, tokens: int, ratio: float) -> None:
        """Record the ratio of a step's duration to its roofline, for a step of `tokens` tokens."""
        self._newest.setdefault(tokens.bit_length(), deque(maxlen=_KEPT)).append(ratio)

    def nearest(self, tokens: int) -> tuple[int, float] | None:
        """Return the median ratio of duration to roofline of the measured steps that are nearest in size.

        Args:
            tokens: The number of tokens of the step to compare with.

        Returns:
            (distance, median ratio). The distance is the largest difference in size, in powers of two. None if fewer
            than 3 steps were measured.
        """
        ratios, level = list[float](), tokens.bit_length()
        for other in sorted(self._newest, key=lambda other: (abs(other - level), other)):
            ratios += self._newest[other]
            if len(ratios) >= MIN_STEPS:
                # The median is robust against single slow steps
                return abs(other - level), median(ratios)
        return None


class DraftedStepTimes:
    """Estimates the device time of a step: its roofline times the measured ratio of steps of similar size.

    The ratios of duration to roofline are kept per power of two of a step's tokens, and separately for steps with and
    without drafts.

    Args:
        cost: Computes the FLOPs and memory traffic of a step of the target model.
        peaks: The peak FLOP/s and bandwidth of the device.
        graphs: The sizes of the steps that are replayed as one CUDA graph. Such a step is padded, and takes the time
            of its padded size. None: steps are not padded.
    """

    def __init__(self, cost: ModelCost, peaks: Peaks, graphs: GraphSteps | None = None) -> None:
        self._graphs = graphs
        self._ratios = {False: _Ratios(), True: _Ratios()}  # key: True for steps with drafts
        self._typical = {False: TypicalRatios(), True: TypicalRatios()}  # the same keys
        self._merged = dict[bool, _Ratios]()  # a cache, cleared when a step is measured
        # Query-key pairs per token, and tokens in the KV cache, of the newest step without prefill, both rounded
        self._context = (0, 0)
        # Bounds with that context, by the step's tokens and the tokens of rows that do not decode
        self._bounds = dict[tuple[int, int], float]()
        self._bound = lru_cache(_REMEMBERED)(lambda shape: roofline_seconds(cost.step(shape), peaks))

    def record_time(self, sample: StepSample) -> None:
        """Learn from the duration of a step. A step during which a CUDA graph was captured is ignored.

        Args:
            sample: The measurements of the step.
        """
        tokens = sample.prefill_tokens + sample.decode_tokens + sample.padded_tokens
        if not tokens or not sample.roofline_s or sample.capture_s:
            return
        useful = max(1, tokens - sample.padded_tokens)
        if not sample.prefill_tokens:
            self._take_context(_rounded(sample.pairs // useful), _rounded(sample.kv_tokens))
        # Rejected drafts took time, too
        sampled = sample.sampled_tokens + sample.padded_tokens
        pairs = sample.pairs + sample.padded_tokens * (sample.pairs // useful)
        bound = self._bound(StepShape(tokens, sampled, pairs, sample.kv_tokens, sample.copied_tokens))
        found, drafted = sample.duration_s / bound, sample.drafted_tokens > 0
        self._ratios[drafted].record_time(tokens, found, self._ratio(tokens, drafted) or found)
        self._typical[drafted].record_time(tokens, found)
        if not drafted:
            # Otherwise, a single slow step would prevent any further draft
            self._ratios[True].fade(self._ratios[False])
        self._merged.clear()

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the estimated device time of a step in seconds.

        Args:
            decodes: The number of rows that decode.
            others: The number of tokens of rows in prefill.
            drafts: The total number of drafts that the step verifies.
        """
        tokens = decodes + others + drafts
        if self._graphs is not None and not others:
            tokens = self._graphs.padded(tokens, drafts > 0)
        return self._bound_of(tokens, others) * (self._ratio(tokens, drafts > 0) or 1.0)

    def typical_seconds(self, decodes: int, others: int) -> float | None:
        """Return the typical device time in seconds of a step without drafts, from medians of measured steps.

        If measured steps with drafts are nearer in size than steps without drafts, their median is used.

        Args:
            decodes: The number of rows that decode.
            others: The number of tokens of rows in prefill.

        Returns:
            Seconds. None if fewer than 3 steps were measured.
        """
        tokens = decodes + others
        if self._graphs is not None and not others:
            tokens = self._graphs.padded(tokens, False)
        measured = [
            found for one in (False, True) if (found := self._typical[one].nearest(tokens)) is not None
        ]
        if not measured:
            return None
        return self._bound_of(tokens, others) * min(measured, key=lambda found: found[0])[1]

    def _bound_of(self, tokens: int, others: int) -> float:
        found = self._bounds.get((tokens, others))
        if found is None:
            pairs, kv_tokens = self._context
            found = self._bound(StepShape(tokens, tokens - others, tokens * pairs, kv_tokens))
            self._bounds[tokens, others] = found
        return found

    def _take_context(self, pairs: int, kv_tokens: int) -> None:
        if self._context != (pairs, kv_tokens) or len(self._bounds) > _REMEMBERED:
            self._context = pairs, kv_tokens
            self._bounds.clear()

    def _ratio(self, tokens: int, drafted: bool) -> float | None:
        if drafted not in self._merged:
            own, plain = self._ratios[True], self._ratios[False]
            self._merged[drafted] = own.extended_by(plain) if drafted else plain
        return self._merged[drafted].at(tokens)


class _Ratios:
    def __init__(self) -> None:
        self._levels = list[int]()  # bit lengths of token counts, ascending
        self._sizes = list[float]()  # mean number of tokens per level
        self._ratios = list[float]()

    def at(self, tokens: int) -> float | None:
        if not self._levels:
            return None
        right = bisect(self._sizes, tokens)
        if right in (0, len(self._sizes)):
            return self._ratios[min(right, len(self._sizes) - 1)]
        low, high = self._sizes[right - 1 : right + 1]
        share = (tokens - low) / (high - low)
        return self._ratios[right - 1] + share * (self._ratios[right] - self._ratios[right - 1])

    def extended_by(self, others: _Ratios) -> _Ratios:
        low, high = (self._levels[0], self._levels[-1]) if self._levels else (0, 0)
        each = zip(others._levels, others._sizes, others._ratios, strict=True)
        outside = [one for one in each if not low <= one[0] <= high]
        found = _Ratios()
        for level, size, ratio in sorted(
            [*zip(self._levels, self._sizes, self._ratios, strict=True), *outside]
        ):
            found._levels.append(level)
            found._sizes.append(size)
            found._ratios.append(ratio)
        return found

    def record_time(self, tokens: int, ratio: float, believed: float) -> None:
        level, at = tokens.bit_length(), bisect(self._levels, tokens.bit_length())
        # Limit the influence of a single step that was delayed by something else
        change = min(ratio, 2 * believed) - believed
        if at and self._levels[at - 1] == level:
            self._ratios[at - 1] += _NEWEST * change
            self._sizes[at - 1] += _NEWEST * (tokens - self._sizes[at - 1])
            return
        self._levels.insert(at, level)
        self._sizes.insert(at, tokens)
        self._ratios.insert(at, believed + 0.5 * change)

    def fade(self, others: _Ratios) -> None:
        for at, size in enumerate(self._sizes):
            plain = others.at(round(size))
            self._ratios[at] += _FORGOTTEN * ((plain or self._ratios[at]) - self._ratios[at])


def _rounded(count: int) -> int:
    shift = max(0, count.bit_length() - 3)
    return count >> shift << shift
