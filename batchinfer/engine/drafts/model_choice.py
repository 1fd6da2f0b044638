"""Decides which rows a model is asked about, and how many tokens of each it pays to have it propose."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.source import DraftingModel, Proposal
from batchinfer.engine.drafts.worth import worth_asking
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence

_BELIEVED = (
    12  # tokens: before any was verified, those of a model count as behind so many that were recognised
)

Found = tuple[Sequence, str, Proposal]


class ModelChoice:
    """Asks a model where its proposals pay for the time that they take."""

    def __init__(self, model: DraftingModel, clock: Callable[[], float] = time.perf_counter) -> None:
        self._model, self._clock = model, clock
        self._spent_s = 0.0  # since this was last taken
        self._turn = 0  # which of the rows is asked about first, where they are too many
        self.paid = False  # whether it was asked for the newest step

    @property
    def name(self) -> DraftName:
        """The name by which reports know the model."""
        return self._model.name

    @property
    def believed(self) -> Proposal:
        """A proposal of the model, of which it is known how likely such ones are to be right."""
        return Proposal((), _BELIEVED)

    def asked(
        self, rows: Seq[Sequence], found: Seq[Found], value: Callable[[Found], float], rate: float
    ) -> tuple[list[Sequence], list[Found]]:
        """Return the rows that the model is asked about, if it pays, and what is kept of what was `found` for rows.
        That has cost nothing: it is kept where it is worth half as much as all that the model may propose."""
        worth, self.paid = self._model.expected(rate, self._model.most_proposed), False
        better = {one[0] for one in found if 2 * value(one) >= worth}
        asked = [row for row in rows if row not in better and self._model.takes(row)]
        most = self._model.most_rows
        if len(asked) > most:
            self._turn = (self._turn + most) % len(asked)
            asked = [*asked[self._turn :], *asked[: self._turn]][:most]
        chosen = set(asked)
        return asked, [one for one in found if one[0] not in chosen]

    def worth(
        self,
        rows: Seq[Sequence],
        rate: float,
        certain: float,
        seconds: Callable[[int], float],
        most: int,
        least: float,
    ) -> int:
        """Return how many tokens of each of these rows it pays to have it propose; see `worth_asking`. seconds: of the
        step that verifies so many of each."""
        return worth_asking(
            partial(self._model.expected, rate),
            len(rows),
            certain,
            lambda each: seconds(each) + self._model.seconds(rows, each),
            min(most, self._model.most_proposed),
            least,
        )

    def proposals(self, rows: Seq[Sequence], count: int) -> list[Found]:
        """Have the model propose; what it has for each row for which it has anything."""
        began, self.paid = self._clock(), True
        given = self._model.propose(rows, count)
        self._spent_s += self._clock() - began
        each = zip(rows, given, strict=True)
        return [(row, self.name, _proposal(tree)) for row, tree in each if len(tree.tokens)]

    def verified(self, tree: DraftTree, taken: AcceptedTokens) -> None:
        """Learn what came of a proposal that says how likely its tokens are."""
        self._model.verified(tree, taken)

    def fade(self, share: float) -> None:
        """Forget a share of what was learnt."""
        self._model.fade(share)

    def take_spent_s(self) -> float:
        """Return the seconds that it took since this was last asked."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent

    def ended(self, row: Sequence) -> None:
        """Forget a row, which has ended."""
        self._model.ended(row)


def _proposal(tree: DraftTree) -> Proposal:
    return Proposal(tree.tokens, _BELIEVED, tree=tree if tree.chances else None)
