"""Says how long a step with drafts would take: by its costs, corrected by how long such steps took."""

from __future__ import annotations

from functools import lru_cache

from batchinfer.core.samples import StepSample
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds

_NEWEST = 0.2  # the weight of the newest step
_REMEMBERED = 1024  # shapes


class DraftedStepTimes:
    """The roofline bound of a step's shape, times how much longer steps of about as many tokens took than theirs.

    Steps are counted by the power of two of their tokens. Where no step had so many tokens, the nearest ones that were
    measured are believed: a step that is tried by mistake is measured, and not tried again.
    """

    def __init__(self, cost: ModelCost, peaks: Peaks) -> None:
        self._ratios: dict[int, float] = {}
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
        before = self._ratios.get(level, found)
        # One step that had to wait for something else says little about the others
        found = min(found, 2 * before)
        self._ratios[level] = before + _NEWEST * (found - before)

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the seconds of a step in which so many rows decode, other rows run so many tokens, and so many drafts
        are verified."""
        tokens = decodes + others + drafts
        rounded = _rounded(self._kv_tokens)
        shape = StepShape(tokens, decodes + drafts, tokens * _rounded(self._pairs), rounded)
        return self._bound(shape) * self._ratio(tokens.bit_length())

    def _ratio(self, level: int) -> float:
        if not self._ratios:
            return 1.0
        nearest = min(self._ratios, key=lambda other: (abs(other - level), other))
        return self._ratios[nearest]


def _rounded(count: int) -> int:
    """Keep the three leading bits of a number, so that shapes repeat."""
    cut = max(0, count.bit_length() - 3)
    return count >> cut << cut
