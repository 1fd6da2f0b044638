"""Says how long a step with drafts would take: by its costs, corrected by how long such steps took."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from functools import lru_cache
from statistics import median

from batchinfer.core.samples import StepSample
from batchinfer.engine.tensors.graph_sizes import GraphSteps
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

FEWEST = 3  # steps: of fewer, the median is not robust against a single slow one
_KEPT = 31  # of each size
_NEWEST = 0.2  # the weight of the newest step
_FORGOTTEN = 0.01  # of what steps with drafts took longer, with each step that has none
_REMEMBERED = 4096  # shapes


class TypicalRatios:
    """Keeps the newest ratios for each power of two of a step's tokens, and gives the median of the nearest."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}

    def measured(self, tokens: int, ratio: float) -> None:
        """Take the ratio of a step."""
        self._newest.setdefault(tokens.bit_length(), deque(maxlen=_KEPT)).append(ratio)

    def nearest(self, tokens: int) -> tuple[int, float] | None:
        """Return how far the steps are that are nearest in size, in powers of two, and the median of their ratios.

        None: too few steps were measured.
        """
        ratios, level = list[float](), tokens.bit_length()
        for one in sorted(self._newest, key=lambda one: (abs(one - level), one)):
            ratios += self._newest[one]
            if len(ratios) >= FEWEST:
                return abs(one - level), median(ratios)
        return None


class DraftedStepTimes:
    """The roofline bound of a step's shape, times how much longer steps of about as many tokens took than theirs.

    Steps with drafts and those without are counted apart, by the power of two of their tokens, and what is between two
    of these is believed to be so in time, too: how much longer a CPU's step takes than its bound changes with each
    token, as it reads weights at one pace and multiplies at another. Beyond what was measured the nearest steps are
    believed, and where steps with drafts had no so few or so many tokens, those without: one that is tried by mistake
    is measured, and not tried again for a while. What was measured of steps with drafts fades while there are none: one
    of them that had to wait for something else would else be the last.

    A step that is replayed as one of `graphs` takes as long as all that it is padded to, so that drafts that take the
    place of padding take no time.
    """

    def __init__(self, cost: ModelCost, peaks: Peaks, graphs: GraphSteps | None = None) -> None:
        self._graphs = graphs
        self._ratios = {False: _Ratios(), True: _Ratios()}  # whether with drafts
        self._typical = {False: TypicalRatios(), True: TypicalRatios()}  # likewise
        self._known = dict[bool, _Ratios]()  # what is believed until the next step is measured
        # Pairs of a token, and tokens of K and V, about, in the newest step that only decoded
        self._context = (0, 0)
        # With such contexts, by all tokens and the others' of them
        self._bounds = dict[tuple[int, int], float]()
        self._bound = lru_cache(_REMEMBERED)(lambda shape: roofline_seconds(cost.step(shape), peaks))

    def measured(self, sample: StepSample) -> None:
        """Take the time of a step. Those that compiled or captured something are left out."""
        tokens = sample.prefill_tokens + sample.decode_tokens + sample.padded_tokens
        if not tokens or not sample.roofline_s or sample.capture_s:
            return
        useful = max(1, tokens - sample.padded_tokens)
        if not sample.prefill_tokens:
            self._take_context(_rounded(sample.pairs // useful), _rounded(sample.kv_tokens))
        # What was computed for rejected drafts took time, too
        sampled = sample.sampled_tokens + sample.padded_tokens
        pairs = sample.pairs + sample.padded_tokens * (sample.pairs // useful)
        bound = self._bound(StepShape(tokens, sampled, pairs, sample.kv_tokens, sample.copied_tokens))
        found, drafted = sample.duration_s / bound, sample.drafted_tokens > 0
        self._ratios[drafted].measured(tokens, found, self._ratio(tokens, drafted) or found)
        self._typical[drafted].measured(tokens, found)
        if not drafted:
            self._ratios[True].fade(self._ratios[False])
        self._known.clear()

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the seconds of a step in which so many rows decode, other rows run so many tokens, and so many drafts
        are verified."""
        tokens = decodes + others + drafts
        if self._graphs is not None and not others:
            tokens = self._graphs.padded(tokens, drafts > 0)
        return self._bound_of(tokens, others) * (self._ratio(tokens, drafts > 0) or 1.0)

    def typical_seconds(self, decodes: int, others: int) -> float | None:
        """Return the median time of such a step without drafts, for reports. None: too few steps were measured.

        Where no step without drafts was about as large, steps with drafts tell how much longer than its bound it takes.
        """
        tokens = decodes + others
        if self._graphs is not None and not others:
            tokens = self._graphs.padded(tokens, False)
        known = [found for one in (False, True) if (found := self._typical[one].nearest(tokens)) is not None]
        if not known:
            return None
        return self._bound_of(tokens, others) * min(known, key=lambda found: found[0])[1]

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
        """Return the ratio of such steps; None where nothing was measured."""
        if drafted not in self._known:
            own, plain = self._ratios[True], self._ratios[False]
            self._known[drafted] = own.with_those_beside(plain) if drafted else plain
        return self._known[drafted].at(tokens)


class _Ratios:
    """How much longer than their bounds steps took, by the power of two of their tokens."""

    def __init__(self) -> None:
        self._levels = list[int]()  # ascending
        self._sizes = list[float]()  # of each, the steps' tokens in the mean
        self._ratios = list[float]()

    def at(self, tokens: int) -> float | None:
        """Return the ratio of steps of so many tokens, between those of the levels beside; None: there are none."""
        if not self._levels:
            return None
        right = bisect(self._sizes, tokens)
        if right in (0, len(self._sizes)):
            return self._ratios[min(right, len(self._sizes) - 1)]
        low, high = self._sizes[right - 1 : right + 1]
        share = (tokens - low) / (high - low)
        return self._ratios[right - 1] + share * (self._ratios[right] - self._ratios[right - 1])

    def with_those_beside(self, others: _Ratios) -> _Ratios:
        """Return these, and of others those of fewer and of more tokens than any of these."""
        low, high = (self._levels[0], self._levels[-1]) if self._levels else (0, 0)
        each = zip(others._levels, others._sizes, others._ratios, strict=True)
        beside = [one for one in each if not low <= one[0] <= high]
        found = _Ratios()
        for level, size, ratio in sorted(
            [*zip(self._levels, self._sizes, self._ratios, strict=True), *beside]
        ):
            found._levels.append(level)
            found._sizes.append(size)
            found._ratios.append(ratio)
        return found

    def measured(self, tokens: int, ratio: float, believed: float) -> None:
        """Take the ratio of a step, of which another one was believed."""
        level, at = tokens.bit_length(), bisect(self._levels, tokens.bit_length())
        # One step that had to wait for something else says little about the others
        change = min(ratio, 2 * believed) - believed
        if at and self._levels[at - 1] == level:
            self._ratios[at - 1] += _NEWEST * change
            self._sizes[at - 1] += _NEWEST * (tokens - self._sizes[at - 1])
            return
        self._levels.insert(at, level)
        self._sizes.insert(at, tokens)
        self._ratios.insert(at, believed + 0.5 * change)

    def fade(self, others: _Ratios) -> None:
        """Approach those of other steps by a little."""
        for at, size in enumerate(self._sizes):
            plain = others.at(round(size))
            self._ratios[at] += _FORGOTTEN * ((plain or self._ratios[at]) - self._ratios[at])


def _rounded(count: int) -> int:
    """Keep the three leading bits of a number, so that shapes repeat."""
    cut = max(0, count.bit_length() - 3)
    return count >> cut << cut
