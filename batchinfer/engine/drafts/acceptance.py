"""Measures how likely the tokens that a source proposes are to be right."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree

_PRIOR_TOKENS = 4.0  # what is believed before anything was verified counts as so many tokens
_MOST_TOKENS = 400.0  # of so many the older ones count half
_WEAKER_TOKENS = 12.0  # of what came of proposals that recognised less: it counts as so many tokens at most
_LEAST, _MOST = 0.02, 0.995


@dataclass(slots=True)
class _Count:
    """Tokens that were verified, and those of them that were right."""

    verified: float = 0.0
    right: float = 0.0

    def scale(self, factor: float) -> None:
        self.verified, self.right = self.verified * factor, self.right * factor


class NodeAcceptance:
    """Counts, for each kind of nodes of trees, how many were right of those whose parents were."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Count] = {}

    def rate(self, kind: Hashable, believed: float) -> float:
        """Return how likely such a node is to be right where its parent is. `believed`: before any was verified."""
        count = self._counts.get(kind) or _Count()
        rate = (count.right + _PRIOR_TOKENS * believed) / (count.verified + _PRIOR_TOKENS)
        return min(_MOST, max(_LEAST / 20, rate))

    def verified(self, tree: DraftTree, taken: AcceptedTokens) -> None:
        """Count the nodes of a tree that were verified: those of its tokens that the step ran behind right ones."""
        parents = tree.parents or range(-1, len(tree.tokens) - 1)
        own = taken.parents or range(-1, len(taken.drafts) - 1)
        node, ran = -1, -1  # of the tree, and of what ran of it
        for right in (*taken.path, None):
            beside = {taken.drafts[at] for at, parent in enumerate(own) if parent == ran}
            found = [at for at, parent in enumerate(parents) if parent == node and tree.tokens[at] in beside]
            for at in found:
                is_right = right is not None and tree.tokens[at] == taken.drafts[right]
                self._count(tree.kinds[at], is_right)
                node = at if is_right else node
            if right is None or not found:
                return
            ran = right

    def fade(self, share: float) -> None:
        """Forget a share of what was counted."""
        for count in self._counts.values():
            count.scale(1 - share)

    def _count(self, kind: Hashable, right: bool) -> None:
        count = self._counts.setdefault(kind, _Count())
        count.verified, count.right = count.verified + 1, count.right + right
        if count.verified > _MOST_TOKENS:
            count.scale(0.5)


class Acceptance:
    """Counts, for each source and each kind of proposal, how many of the drafts that were verified were right: those
    behind a wrong one were not verified.

    A source that was wrong is believed again as steps pass (`fade`), or nothing would show that it has become better.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, bool]], _Count] = {}
        self._rates: dict[tuple[str, int, bool], float] = {}  # as long as nothing is counted

    def rate(self, source: str, proposal: Proposal) -> float:
        """Return how likely each token of a proposal is to be right where those before it are."""
        known = (source, proposal.matched, proposal.agreed)
        found = self._rates.get(known)
        if found is None:
            found = self._rates[known] = self._rate(source, proposal)
        return found

    def _rate(self, source: str, proposal: Proposal) -> float:
        count = self._counts.get((source, proposal.kind)) or _Count()
        believed = 1 - 1 / (1 + proposal.matched / 4)
        weaker = self._weaker(source, proposal.kind)
        if weaker.right <= believed * weaker.verified:
            weaker = _Count()
        right = count.right + weaker.right + _PRIOR_TOKENS * believed
        rate = right / (count.verified + weaker.verified + _PRIOR_TOKENS)
        return min(_MOST, max(_LEAST, rate))

    def _weaker(self, source: str, kind: tuple[int, bool]) -> _Count:
        """Return what came of proposals of which no more was recognised: such a one is at least as likely, so that
        where these were right, a text is copied, and few words show it."""
        found = _Count()
        for (name, other), count in self._counts.items():
            if name == source and other != kind and other[0] <= kind[0] and other[1] <= kind[1]:
                found.verified, found.right = found.verified + count.verified, found.right + count.right
        found.scale(min(1.0, _WEAKER_TOKENS / max(1.0, found.verified)))
        return found

    def verified(self, source: str, proposal: Proposal, drafts: int, right: int) -> None:
        """Count the first `drafts` tokens of a proposal, of which the first `right` were right."""
        self._rates.clear()
        count = self._counts.setdefault((source, proposal.kind), _Count())
        count.right += right
        count.verified += min(drafts, right + 1)
        if count.verified > _MOST_TOKENS:
            count.scale(0.5)

    def fade(self, share: float) -> None:
        """Forget a share of what was counted."""
        self._rates.clear()
        for count in self._counts.values():
            count.scale(1 - share)
