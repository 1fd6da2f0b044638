"""Decides for which rows a draft model is queried, and how many tokens it proposes for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.draft_value import choose_proposal_length
from batchinfer.engine.drafts.source import DraftingModel, Proposal
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence

_PRIOR_MATCH = 12  # match length that a draft model's proposals count as before any was verified, in tokens

Found = tuple[Sequence, str, Proposal]


class ModelChoice:
    """Chooses the rows for which a draft model is queried, and the number of tokens that it proposes.

    A row is a running sequence. The model is queried only if it is expected to save more time than it takes.
    """

    def __init__(self, model: DraftingModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        self._spent_s = 0.0  # proposing time since the last call of take_spent_s
        self._turn = 0  # index of the first row of a query, if there are more rows than a query may have
        self.was_queried = False  # for the newest step

    @property
    def name(self) -> DraftSourceName:
        """The name of the draft model in reports."""
        return self._model.name

    @property
    def prior(self) -> Proposal:
        """An empty proposal, by which the acceptance rate of the draft model's proposals is looked up."""
        return Proposal((), _PRIOR_MATCH)

    def choose_rows(
        self, rows: Seq[Sequence], found: Seq[Found], value: Callable[[Found], float], rate: float
    ) -> tuple[list[Sequence], list[Found]]:
        """Choose the rows for which the draft model would be queried.

        A row with a proposal of another source is left out if that proposal's expected number of accepted tokens is at
        least half of the draft model's.

        Args:
            rows: The sequences that may be queried.
            found: The proposals of other sources.
            value: Returns the expected number of accepted tokens of a proposal.
            rate: The acceptance rate of the draft model's tokens.

        Returns:
            The rows to query, at most the model's maximum per query, and the elements of `found` that belong to other
            rows.
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
        """Return the number of tokens that the draft model should propose per row, or 0 if querying it is too slow.

        Args:
            rows: The sequences to query the model for.
            rate: The acceptance rate of the draft model's tokens.
            certain: The number of tokens that the next step yields without the draft model's proposals.
            seconds: Returns the duration of the next step in seconds from the number of verified tokens per row. It
                does not include the time that the draft model takes, which is added.
            most: Maximum number of proposed tokens per row.
            least: The tokens per second without the draft model. The draft model must exceed them by 3 %.
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
        """Query the draft model for up to `count` tokens per row.

        Returns:
            (row, name of the draft model, proposal) for each row with a proposal that is not empty.
        """
        began, self.was_queried = self._clock(), True
        given = self._model.propose(rows, count)
        self._spent_s += self._clock() - began
        each = zip(rows, given, strict=True)
        return [(row, self.name, _proposal(tree)) for row, tree in each if len(tree.tokens)]

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Pass a verified tree to the draft model, which learns its acceptance rates from it.

        Args:
            tree: The tree that the model proposed.
            outcome: The result of the step that verified it.
        """
        self._model.record_verified(tree, outcome)

    def fade(self, share: float) -> None:
        """Multiply all acceptance counts of the draft model by 1 - `share`, so that newer results weigh more."""
        self._model.fade(share)

    def take_spent_s(self) -> float:
        """Return the seconds spent on proposals of the draft model since the last call of this method."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def finish(self, row: Sequence) -> None:
        """Delete the draft model's state of a sequence that has ended."""
        self._model.finish(row)


def _proposal(tree: DraftTree) -> Proposal:
    return Proposal(tree.tokens, _PRIOR_MATCH, tree=tree if tree.chances else None)
