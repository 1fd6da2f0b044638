"""Queries all sources for drafts, and takes the number of drafts that gives the most tokens a second."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.drafts.acceptance import Acceptance
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.patience import Patience, SearchTime
from batchinfer.engine.drafts.source import LAST_WORDS, MOST_DRAFTS, DraftSource, Proposal
from batchinfer.engine.drafts.step_costs import StepCosts
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.drafts.worth import NOBODY, Decoding, drafts_worth, waiting_pays
from batchinfer.engine.loop.drafting import Drafts
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.sequence import Sequence

# Tokens that are looked for: where one of the drafts is wrong, as many as a step takes are left behind it
_MOST_FOUND = 2 * MOST_DRAFTS
_PENALISED_TOKENS = 1 << 16  # of the texts of a row's drafts together
_MISSED = 1.1  # tokens that a row gets less where it waits: it misses a step
_ENOUGH = 6.0  # tokens that are expected to be right: then no further source is asked
_FADED = 0.002  # of what was measured, with each step


_Found = tuple[Sequence, str, Proposal]


@dataclass(slots=True)
class _Row:
    """The state of a row whose drafts are looked for."""

    texts: Patience  # with sources that know texts
    model: Patience  # with a model
    source: str = ""  # of its newest drafts
    proposal: Proposal | None = None
    # What the proposal has behind a token that was wrong: a copy in which one word is another goes on behind it
    rest: Proposal | None = None
    drafts: int = 0  # the newest ones
    right: float = 0.0  # how many of these were expected to be


class CostedDrafter:
    """Proposes the drafts with which a step is expected to give the most tokens a second.

    Sources are queried in their order. A row without accepted drafts is queried with exponentially decreasing
    frequency.

    Args:
        sources: The sources that know texts.
        times: Durations of steps on the device.
        most_sampled: The most rows of a step that are sampled, drafts included. Each may have its own logits.
        looks_ahead: Whether the host prepares a step while the step before it runs. Then a row with drafts misses the
            following step, and gains only if more than one draft is right; or that step waits for the row.
        clock: Returns seconds.
        model: A draft model. It is queried for rows about which the sources know less, if its own time pays off.
        most_drafts: The most drafts of a row in a step; None: all that are found.
    """

    def __init__(
        self,
        sources: Seq[DraftSource],
        times: DraftedStepTimes,
        most_sampled: int,
        looks_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        model: ModelChoice | None = None,
        most_drafts: int | None = None,
    ) -> None:
        self._model = model
        self._most_drafts = MOST_DRAFTS if most_drafts is None else most_drafts
        self._sources = sources
        self._costs, self._search = StepCosts(times, looks_ahead), SearchTime()
        self._looks_ahead, self._clock = looks_ahead, clock
        self._most_sampled, self._acceptance = most_sampled, Acceptance()
        self._rows: dict[Sequence, _Row] = {}
        self._turn = 0  # which of the rows is looked at first
        self._pays = False  # whether drafts may pay in the next step
        # Of each source, drafts that were verified since the last sample, and right ones
        self._counts: dict[str, tuple[int, int]] = {}

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Drafts]]:
        """Return the drafts of those of these rows that get any in the next step; see `Drafter`. All that this takes
        counts as looking for drafts."""
        began = self._clock()
        decodes, others = len(rows) + ahead, max(others, self._costs.prompt_tokens)
        self._costs.planned(decodes, ahead, others)
        self._pays = decodes > 0 and self._costs.may_pay(decodes, others)
        asked = self._asked(rows) if self._pays else []
        found = self._found(asked) if asked else []
        self._search.spent(self._clock() - began)
        if self._pays and self._model is not None:
            found = self._with_model(self._model, rows, found, decodes, others)
        began = self._clock()
        chosen = self._best(found, decodes, others) if found else []
        given = {sequence for sequence, _ in chosen}
        for row in asked if not self._costs.together else ():
            if row not in given:  # it waited for nothing
                self._rows[row].texts.failed(len(row), self._patience)
        self._search.spent(self._clock() - began)
        return chosen

    def waits(self, sequence: Sequence) -> bool:
        """Whether a row's drafts were right lately, or it is time to look; see `Drafter`."""
        if not self._pays:
            return False
        row = self._rows.get(sequence)
        if self._model is not None and self._model.paid and (row is None or row.model.over(len(sequence))):
            return True
        if self._search.is_spent:
            return False
        return row is None or row.texts.over(len(sequence))

    def holds(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        """Whether one step of all rows, for which the device waits, gives more tokens a second than one of those that
        can run now and one of the others; see `Drafter`."""
        if self._costs.prompt_tokens or not plain + len(ready):
            return False
        return waiting_pays(self._costs.device_seconds, self._decoding(waiting), self._decoding(ready), plain)

    def _decoding(self, rows: Seq[Sequence]) -> Decoding:
        """Expect of rows what was expected of their newest drafts."""
        known = [self._rows[row] for row in rows if row in self._rows]
        return Decoding(
            len(rows), sum(one.drafts for one in known), len(rows) + sum(one.right for one in known)
        )

    @property
    def _patience(self) -> int:
        """How often a row may fail. Behind a word that a copy changes nothing is found for some tokens; where a row
        waits for nothing, each costs a step."""
        return 4 if self._costs.together else 0

    def verified(self, taken: AcceptedTokens) -> None:
        """Count a row's drafts, and those that were right."""
        row = self._rows[taken.sequence]
        assert row.proposal is not None, "drafts that nobody proposed"
        drafts = len(taken.drafts)
        if row.proposal.tree is None:
            self._acceptance.verified(row.source, row.proposal, drafts, taken.right)
        elif self._model is not None:
            self._model.verified(row.proposal.tree, taken)
        before = self._counts.get(row.source, (0, 0))
        self._counts[row.source] = (before[0] + drafts, before[1] + taken.right)
        computed = self._model is not None and row.source == self._model.name
        rest = () if computed else row.proposal.tokens[taken.right + 1 :]
        row.rest = Proposal(rest, 1) if taken.right < drafts and len(rest) else None
        patience = row.model if computed else row.texts
        if taken.right:
            patience.succeeded()
        else:
            patience.failed(len(taken.sequence), self._patience)

    def ended(self, sequence: Sequence) -> None:
        """Let the sources learn an answer."""
        self._rows.pop(sequence, None)
        if self._model is not None:
            self._model.ended(sequence)
        if sequence.output_length:
            self._tell(sequence.tokens[max(0, sequence.prompt_length - LAST_WORDS) :])

    def learn(self, answer: TokenIds) -> None:
        """Let the sources learn an answer of another engine."""
        self._tell(array("i", answer.tobytes()))

    def stepped(self, sample: StepSample) -> StepSample:
        """Learn how long a step took; the sample with what its drafts came to."""
        spent_s = 0.0 if self._model is None else self._model.take_spent_s()
        if self._counts:
            sample = replace(sample, **self._counted(sample, spent_s))
            self._counts = {}
        if spent_s:
            saved_s = sample.drafts_saved_s if sample.drafted_tokens else -spent_s
            sample = replace(sample, proposing_s=spent_s, drafts_saved_s=saved_s)
        steps_s = max(0.0, sample.duration_s - spent_s)
        self._costs.measured(sample, steps_s)
        self._acceptance.fade(_FADED)
        if self._model is not None:
            self._model.fade(_FADED)
        self._search.stepped(steps_s + max(0.0, sample.drafts_saved_s or 0.0))
        return sample

    def _tell(self, text: array[int]) -> None:
        for source in self._sources:
            source.learn(text)

    def _counted(self, sample: StepSample, spent_s: float) -> dict[str, Any]:
        """Return the fields of a step's sample about its drafts.

        Args:
            sample: the step, in whose time proposing took `spent_s` seconds.
        """
        found: dict[str, Any] = {}
        for source, (drafted, accepted) in self._counts.items():
            found |= {f"{source}_drafted": drafted, f"{source}_accepted": accepted}
        drafted, accepted = (sum(column) for column in zip(*self._counts.values(), strict=True))
        saved_s = self._costs.saved_s(sample, accepted, spent_s)
        return found | {"drafted_tokens": drafted, "accepted_tokens": accepted, "drafts_saved_s": saved_s}

    def _asked(self, rows: Seq[Sequence]) -> list[Sequence]:
        """Return the rows that are looked at now, in turn, as many as there is time for."""
        ready = [row for row in rows if self._row(row).texts.over(len(row))]
        most = self._search.rows(len(ready))
        if most >= len(ready):
            return ready
        self._turn = (self._turn + most) % len(ready)  # whose turn it was not is next
        return [*ready[self._turn :], *ready[: self._turn]][:most]

    def _found(self, rows: list[Sequence]) -> list[_Found]:
        """Return the most promising proposal for each row that has any."""
        began = self._clock()
        best: dict[Sequence, tuple[float, str, Proposal]] = {}
        for row, name, proposal in self._proposals(rows, lambda row: row in best and best[row][0] >= _ENOUGH):
            value = self._value((row, name, proposal))
            if row not in best or value > best[row][0]:
                best[row] = (value, name, proposal)
        for row in rows:
            if row not in best:
                self._rows[row].texts.failed(len(row), self._patience)
        self._search.looked_at(len(rows), self._clock() - began)
        return [(row, source, proposal) for row, (_, source, proposal) in best.items()]

    def _row(self, row: Sequence) -> _Row:
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = _Row(Patience(), Patience())
        return found

    def _with_model(
        self, model: ModelChoice, rows: Seq[Sequence], found: list[_Found], decodes: int, others: int
    ) -> list[_Found]:
        """Return what was found, with proposals of the model in the place of those that are worth less, where they
        pay."""
        ready = [row for row in rows if self._row(row).model.over(len(row))]
        rate = self._acceptance.rate(model.name, model.believed)
        asked, kept = model.asked(ready, found, self._value, rate)
        if not asked:
            return found
        seconds = self._costs.seconds
        before = self._worth(found, decodes, others)
        verified, certain = self._worth(kept, decodes, others) if kept else (0, 0.0)
        least = (decodes + before[1]) / seconds(decodes, others, before[0])
        count = model.worth(
            asked,
            rate,
            decodes + certain,
            lambda each: seconds(decodes, others, verified + each * len(asked)),
            min(self._most_drafts, (self._most_sampled - decodes - verified) // len(asked)),
            least,
        )
        return [*kept, *model.proposals(asked, count)] if count else found

    def _value(self, found: _Found) -> float:
        _, source, proposal = found
        return proposal.right(self._acceptance.rate(source, proposal), len(proposal.tokens))

    def _worth(self, found: list[_Found], decodes: int, others: int) -> tuple[int, float]:
        """Return how many of these drafts it pays to verify, and how many of those are expected to be right."""
        if not found:
            return 0, 0.0
        rates, counts = self._counts_worth(found, decodes, others)
        return int(counts.sum()), sum(_rights(found, rates, counts))

    def _counts_worth(
        self, found: list[_Found], decodes: int, others: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return how likely the tokens of each proposal are to be right, and how many of them it pays to verify."""
        rates = np.array([self._acceptance.rate(source, proposal) for _, source, proposal in found])
        lengths = np.array([_verified(row, proposal) for row, _, proposal in found], np.int64)
        lengths, seconds = np.minimum(lengths, self._most_drafts), self._costs.seconds
        counts = drafts_worth(
            rates,
            lengths,
            lambda n: seconds(decodes, others, n),
            decodes,
            self._most_sampled - decodes,
            {at: tree.chances for at, (_, _, one) in enumerate(found) if (tree := one.tree) is not None},
        )
        return rates, counts

    def _best(self, found: list[_Found], decodes: int, others: int) -> list[tuple[Sequence, Drafts]]:
        """Return the drafts that pay, of those that were found."""
        rates, counts = self._counts_worth(found, decodes, others)
        rights = _rights(found, rates, counts)
        each = [one for one in zip(found, rights, counts.tolist(), strict=True) if one[2]]
        if self._looks_ahead and each and not (self._costs.together and self._would_hold(each, decodes)):
            each = [one for one in each if one[1] >= _MISSED]
        return [
            self._chosen(sequence, source, proposal, count, right)
            for (sequence, source, proposal), right, count in each
        ]

    def _would_hold(self, chosen: list[tuple[_Found, float, int]], decodes: int) -> bool:
        """Whether the step behind one with these drafts would wait for it."""
        tokens = sum(1 + right for _, right, _ in chosen)
        drafted = Decoding(len(chosen), sum(n for _, _, n in chosen), tokens)
        if len(chosen) == decodes:
            return True  # nothing is left that could run meanwhile
        return waiting_pays(self._costs.device_seconds, drafted, NOBODY, decodes - len(chosen))

    def _proposals(
        self, rows: list[Sequence], enough: Callable[[Sequence], bool]
    ) -> Iterator[tuple[Sequence, str, Proposal]]:
        """Yield what may follow each row, until there is `enough`."""
        for row in rows:
            state = self._rows[row]
            if state.rest is not None:
                yield row, state.source, state.rest
                state.rest = None
        for source in self._sources:
            asked = [row for row in rows if not enough(row)]
            for row, proposal in zip(asked, source.propose(asked, _MOST_FOUND), strict=True):
                if proposal is not None:
                    yield row, source.name, proposal

    def _chosen(
        self, sequence: Sequence, source: str, proposal: Proposal, count: int, right: float
    ) -> tuple[Sequence, Drafts]:
        row = self._rows[sequence]
        row.source, row.proposal, row.drafts, row.right = source, proposal, count, right
        return sequence, proposal.tokens[:count] if proposal.tree is None else proposal.tree.first(count)


def _rights(found: list[_Found], rates: NDArray[np.float64], counts: NDArray[np.int64]) -> list[float]:
    """Return how many of so many first tokens of each proposal are expected to be right."""
    each = zip(found, rates.tolist(), counts.tolist(), strict=True)
    return [proposal.right(rate, count) for (_, _, proposal), rate, count in each]


def _verified(row: Sequence, proposal: Proposal) -> int:
    """Return how many tokens of a proposal can be verified at once: each has a text of its own where the text changes
    its logits."""
    if not row.request.params.penalised:
        return len(proposal.tokens)
    return min(len(proposal.tokens), _PENALISED_TOKENS // len(row))
