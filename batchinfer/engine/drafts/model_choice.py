"""Decides for which rows a draft model is queried, and how many tokens it proposes for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.draft_value import choose_proposal_length
from batchinfer.engine.drafts.source import DraftingModel, Proposal
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence

_PRIOR_MATCH = 12  # match length that a draft model's proposals count as before any was verified, in tokens

Found = tuple[Sequence, str, Proposal]


class ModelChoice:
    """Queries a draft model when the expected gain exceeds its cost."""

    def __init__(self, model: DraftingModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        self._spent_s = 0.0  # proposing time since the last call of take_spent_s
        self._turn = 0  # index of the first row of a query, if there are more rows than a query may have
        self.was_queried = False  # for the newest step

    @property
    def name(self) -> DraftName:
        """The name of the draft model in reports."""
        return self._model.name

    @property
    def prior(self) -> Proposal:
        """An empty proposal of the kind that the model makes, to look up its acceptance rate."""
        return Proposal((), _PRIOR_MATCH)

    def choose_rows(
        self, rows: Seq[Sequence], found: Seq[Found], value: Callable[[Found], float], rate: float
    ) -> tuple[list[Sequence], list[Found]]:
        """Choose the rows for which the model is queried, if the query is worth its cost.

        A proposal that was found without the model costs nothing. It is kept if its expected number of accepted tokens
        is at least half of the model's.

        Args:
            rows: The rows that may be queried.
            found: The proposals of other sources.
            value: Returns the expected number of accepted tokens of a proposal.
            rate: The acceptance rate of the model's tokens.

        Returns:
            The rows to query, and the proposals of all other rows.
        """
        gain, self.was_queried = self._model.expected(rate, self._model.most_proposed), False
        better = {one[0] for one in found if 2 * value(one) >= gain}
        queried = [row for row in rows if row not in better and self._model.can_draft(row)]
        most = self._model.most_rows
        if len(queried) > most:
            self._turn = (self._turn + most) % len(queried)
            queried = [*queried[self._turn :], *queried[: self._turn]][:most]
        chosen = set(queried)
        return queried, [one for one in found if one[0] not in chosen]

    def choose_length(
        self,
        rows: Seq[Sequence],
        rate: float,
        certain: float,
        seconds: Callable[[int], float],
        most: int,
        least: float,
    ) -> int:
        """Return the number of tokens that the model should propose per row; see `choose_proposal_length`.

        Args:
            rows: The rows to query.
            rate: The acceptance rate of the model's tokens.
            certain: The tokens that the step yields without these proposals.
            seconds: Returns the duration of the step that verifies a number of tokens per row, without proposing.
            most: Maximum number of tokens per row.
            least: The tokens per second without the draft model.
        """
        return choose_proposal_length(
            partial(self._model.expected, rate),
            len(rows),
            certain,
            lambda each: seconds(each) + self._model.seconds(rows, each),
            min(most, self._model.most_proposed),
            least,
        )

    def proposals(self, rows: Seq[Sequence], count: int) -> list[Found]:
        """Query the model and return its proposals, without rows for which it proposes nothing."""
        began, self.was_queried = self._clock(), True
        given = self._model.propose(rows, count)
        self._spent_s += self._clock() - began
        each = zip(rows, given, strict=True)
        return [(row, self.name, _proposal(tree)) for row, tree in each if len(tree.tokens)]

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Learn from the verification of a proposed tree."""
        self._model.record_verified(tree, outcome)

    def fade(self, share: float) -> None:
        """Scale all counts by 1 - `share` to give newer results more weight."""
        self._model.fade(share)

    def take_spent_s(self) -> float:
        """Return the proposing time since the last call, in seconds."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def finish(self, row: Sequence) -> None:
        """Forget a row that has ended."""
        self._model.finish(row)


def _proposal(tree: DraftTree) -> Proposal:
    return Proposal(tree.tokens, _PRIOR_MATCH, tree=tree if tree.chances else None)
