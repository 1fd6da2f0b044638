"""Says how long a step with drafts would take: by its costs, corrected by how long such steps took."""

from __future__ import annotations

from functools import lru_cache

from batchinfer.core.samples import StepSample
from batchinfer.engine.tensors.graph_sizes import GraphSteps
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

_NEWEST = 0.2  # the weight of the newest step
_FORGOTTEN = 0.01  # of what steps with drafts took longer, with each step that has none
_REMEMBERED = 4096  # shapes


class DraftedStepTimes:
    """The roofline bound of a step's shape, times how much longer steps of about as many tokens took than theirs.

    Steps with drafts and those without are counted apart, by the power of two of their tokens. Where no step had so
    many tokens, the nearest ones that were measured are believed, and of steps with drafts, before there was any, those
    without: a step that is tried by mistake is measured, and not tried again for a while. What was measured of steps
    with drafts fades while there are none: one of them that had to wait for something else would else be the last.

    A step that is replayed as one of `graphs` takes as long as all that it is padded to, so that drafts that take the
    place of padding take no time.
    """

    def __init__(self, cost: ModelCost, peaks: Peaks, graphs: GraphSteps | None = None) -> None:
        self._graphs = graphs
        self._ratios: dict[bool, dict[int, float]] = {False: {}, True: {}}  # whether with drafts; by level
        self._pairs = self._kv_tokens = 0  # of a token, and of all, in the newest step that only decoded
        self._bound = lru_cache(_REMEMBERED)(lambda shape: roofline_seconds(cost.step(shape), peaks))

    def measured(self, sample: StepSample) -> None:
        """Take the time of a step. Those that compiled or captured something are left out."""
        tokens = sample.prefill_tokens + sample.decode_tokens + sample.padded_tokens
        if not tokens or not sample.roofline_s or sample.capture_s:
            return
        useful = max(1, tokens - sample.padded_tokens)
        if not sample.prefill_tokens:
            self._pairs, self._kv_tokens = sample.pairs // useful, sample.kv_tokens
        # What was computed for rejected drafts took time, too
        sampled = sample.sampled_tokens + sample.padded_tokens
        pairs = sample.pairs + sample.padded_tokens * (sample.pairs // useful)
        bound = self._bound(StepShape(tokens, sampled, pairs, sample.kv_tokens, sample.copied_tokens))
        found, level = sample.duration_s / bound, tokens.bit_length()
        ratios = self._ratios[sample.drafted_tokens > 0]
        before = self._ratio(level, sample.drafted_tokens > 0) or found
        # One step that had to wait for something else says little about the others
        found = min(found, 2 * before)
        ratios[level] = before + (_NEWEST if level in ratios else 0.5) * (found - before)
        if not sample.drafted_tokens:
            self._fade()

    def _fade(self) -> None:
        drafted = self._ratios[True]
        for level, ratio in drafted.items():
            plain = self._ratio(level, False) or ratio
            drafted[level] = ratio + _FORGOTTEN * (plain - ratio)

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the seconds of a step in which so many rows decode, other rows run so many tokens, and so many drafts
        are verified."""
        tokens = decodes + others + drafts
        if self._graphs is not None and not others:
            tokens = self._graphs.padded(tokens, drafts > 0)
        rounded = _rounded(self._kv_tokens)
        shape = StepShape(tokens, tokens - others, tokens * _rounded(self._pairs), rounded)
        return self._bound(shape) * (self._ratio(tokens.bit_length(), drafts > 0) or 1.0)

    def _ratio(self, level: int, drafted: bool) -> float | None:
        """Return the ratio of such steps, of the nearest level; None where nothing was measured."""
        ratios = self._ratios[drafted] or self._ratios[False]
        if not ratios:
            return None
        return ratios.get(level) or ratios[min(ratios, key=lambda other: (abs(other - level), other))]


def _rounded(count: int) -> int:
    """Keep the three leading bits of a number, so that shapes repeat."""
    cut = max(0, count.bit_length() - 3)
    return count >> cut << cut
