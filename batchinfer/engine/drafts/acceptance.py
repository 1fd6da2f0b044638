"""Estimates the probability that draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree

_PRIOR_TOKENS = 4.0  # weight of the prior rate, in verified tokens
_MOST_TOKENS = 400.0  # verified tokens after which all counts are halved
_WEAKER_TOKENS = 12.0  # maximum weight of the results of shorter matches, in verified tokens
_LEAST, _MOST = 0.02, 0.995  # bounds of an estimated rate


@dataclass(slots=True)
class _Count:
    verified: float = 0.0
    accepted: float = 0.0

    def scale(self, factor: float) -> None:
        self.verified, self.accepted = self.verified * factor, self.accepted * factor


class NodeAcceptance:
    """Estimates the probability that a node of a draft tree is accepted, given that its parent was accepted.

    Each draft source assigns a kind to its nodes, such as (depth, rank). The estimate for a node is the acceptance
    rate of earlier nodes of the same kind.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Count] = {}

    def rate(self, kind: Hashable, believed: float) -> float:
        """Return the estimated probability that a node of this kind is accepted if its parent is.

        Args:
            kind: The kind that the draft source assigned to the node.
            believed: The prior probability. It has the weight of 4 verified nodes.
        """
        count = self._counts.get(kind) or _Count()
        rate = (count.accepted + _PRIOR_TOKENS * believed) / (count.verified + _PRIOR_TOKENS)
        return min(_MOST, max(_LEAST / 20, rate))

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Count, per kind of node, how many nodes of a draft tree were verified and how many were accepted.

        Children of rejected nodes are not counted, because the step does not decide whether they are right.

        Args:
            tree: The proposed tree.
            outcome: The result of the step that verified the tree, or only some of its nodes.
        """
        parents = tree.parents or range(-1, len(tree.tokens) - 1)
        run_parents = outcome.parents or range(-1, len(outcome.drafts) - 1)
        node, run_node = (
            -1,
            -1,
        )  # the same accepted token: its index in the tree, and among the drafts that ran
        for accepted in (*outcome.path, None):
            siblings = {outcome.drafts[at] for at, parent in enumerate(run_parents) if parent == run_node}
            found = [
                at for at, parent in enumerate(parents) if parent == node and tree.tokens[at] in siblings
            ]
            for at in found:
                is_accepted = accepted is not None and tree.tokens[at] == outcome.drafts[accepted]
                self._count(tree.kinds[at], is_accepted)
                node = at if is_accepted else node
            if accepted is None or not found:
                return
            run_node = accepted

    def fade(self, share: float) -> None:
        """Multiply all counts of verified and accepted nodes by 1 - `share`, so that newer results weigh more."""
        for count in self._counts.values():
            count.scale(1 - share)

    def _count(self, kind: Hashable, accepted: bool) -> None:
        count = self._counts.setdefault(kind, _Count())
        count.verified, count.accepted = count.verified + 1, count.accepted + accepted
        if count.verified > _MOST_TOKENS:
            count.scale(0.5)


class Acceptance:
    """Estimates the acceptance rate of draft tokens from the results of earlier steps.

    Results are counted per draft source and per `Proposal.kind` (the length of the matching text). Drafts after a
    rejected draft are not verified, so they are not counted. Old results lose weight as steps pass, so a source with a
    low rate is tried again later.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, tuple[int, bool]], _Count] = {}
        self._rates: dict[tuple[str, int, bool], float] = {}  # a cache, cleared when counts change

    def rate(self, source: str, proposal: Proposal) -> float:
        """Return the estimated probability that a token of a proposal is accepted if the tokens before it are.

        Args:
            source: The name of the draft source.
            proposal: The proposal. Results of earlier proposals with a similar match length are used.
        """
        key = (source, proposal.matched, proposal.agreed)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = self._rate(source, proposal)
        return found

    def _rate(self, source: str, proposal: Proposal) -> float:
        count = self._counts.get((source, proposal.kind)) or _Count()
        believed = 1 - 1 / (1 + proposal.matched / 4)
        weaker = self._weaker(source, proposal.kind)
        if weaker.accepted <= believed * weaker.verified:
            weaker = _Count()
        accepted = count.accepted + weaker.accepted + _PRIOR_TOKENS * believed
        rate = accepted / (count.verified + weaker.verified + _PRIOR_TOKENS)
        return min(_MOST, max(_LEAST, rate))

    def _weaker(self, source: str, kind: tuple[int, bool]) -> _Count:
        # A longer match is at least as reliable. If short matches are accepted often, the text is probably copied.
        found = _Count()
        for (name, other), count in self._counts.items():
            if name == source and other != kind and other[0] <= kind[0] and other[1] <= kind[1]:
                found.verified, found.accepted = (
                    found.verified + count.verified,
                    found.accepted + count.accepted,
                )
        found.scale(min(1.0, _WEAKER_TOKENS / max(1.0, found.verified)))
        return found

    def record_verified(self, source: str, proposal: Proposal, drafts: int, accepted: int) -> None:
        """Count how many tokens of a proposal were verified and how many were accepted.

        Args:
            source: The name of the draft source that made the proposal.
            proposal: The proposal.
            drafts: The number of leading tokens of the proposal that the step verified.
            accepted: The number of leading tokens that were accepted.
        """
        self._rates.clear()
        count = self._counts.setdefault((source, proposal.kind), _Count())
        count.accepted += accepted
        count.verified += min(drafts, accepted + 1)
        if count.verified > _MOST_TOKENS:
            count.scale(0.5)

    def fade(self, share: float) -> None:
        """Multiply all counts of verified and accepted tokens by 1 - `share`, so that newer results weigh more."""
        self._rates.clear()
        for count in self._counts.values():
            count.scale(1 - share)
