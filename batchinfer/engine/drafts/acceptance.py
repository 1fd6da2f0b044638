"""Measures how likely the tokens that a source proposes are to be right."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.engine.drafts.source import Proposal

_PRIOR_TOKENS = 4.0  # what is believed before anything was verified counts as so many tokens
_MOST_TOKENS = 400.0  # of so many the older ones count half
_LEAST, _MOST = 0.02, 0.995


@dataclass(slots=True)
class _Count:
    """Tokens that were verified, and those of them that were right."""

    verified: float = 0.0
    right: float = 0.0

    def scale(self, factor: float) -> None:
        self.verified, self.right = self.verified * factor, self.right * factor


class Acceptance:
    """Counts, for each source and each kind of proposal, how many of the drafts that were verified were right: those
    behind a wrong one were not verified.

    A source that was wrong is believed again as steps pass (`fade`), or nothing would show that it has become better.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, bool]], _Count] = {}

    def rate(self, source: str, proposal: Proposal) -> float:
        """Return how likely each token of a proposal is to be right where those before it are."""
        count = self._counts.get((source, proposal.kind)) or _Count()
        believed = 1 - 1 / (1 + proposal.matched / 4)
        rate = (count.right + _PRIOR_TOKENS * believed) / (count.verified + _PRIOR_TOKENS)
        return min(_MOST, max(_LEAST, rate))

    def verified(self, source: str, proposal: Proposal, drafts: int, right: int) -> None:
        """Count the first `drafts` tokens of a proposal, of which the first `right` were right."""
        count = self._counts.setdefault((source, proposal.kind), _Count())
        count.right += right
        count.verified += min(drafts, right + 1)
        if count.verified > _MOST_TOKENS:
            count.scale(0.5)

    def fade(self, share: float) -> None:
        """Forget a share of what was counted."""
        for count in self._counts.values():
            count.scale(1 - share)
