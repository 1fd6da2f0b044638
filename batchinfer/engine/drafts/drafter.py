"""Asks all sources for drafts, and takes as many as it pays to verify."""

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
from batchinfer.engine.drafts.holding import NOBODY, Decoding, host_seconds, waiting_pays
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.patience import Patience
from batchinfer.engine.drafts.source import LAST_WORDS, MOST_DRAFTS, DraftSource, Proposal
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.drafts.worth import LEAST_GAIN, drafts_worth
from batchinfer.engine.loop.drafting import Drafts
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.sequence import Sequence

# Tokens that are looked for: where one of the drafts is wrong, as many as a step takes are left behind it
_MOST_FOUND = 2 * MOST_DRAFTS
SHARE = 0.05  # of the time that steps would take without drafts: looking for drafts takes no more
_SAVED_STEPS = 20  # of whose time the share may be spent at once
_PENALISED_TOKENS = 1 << 16  # of the texts of a row's drafts together
_MISSED = 1.1  # tokens that a row gets less where it waits: it misses a step
_ENOUGH = 6.0  # tokens that are expected to be right: then no further source is asked
_FADED = 0.002  # of what was measured, with each step
_NEWEST = 0.05  # the weight of the newest step in a mean


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
    """Proposes the drafts with which a step is expected to give the most tokens a second. Sources are asked in their
    order.

    `most_sampled`: rows of a step that are sampled, drafts included: each may have logits of its own.

    `looks_ahead`: a row with drafts misses the step behind, so that it gains only where more than one of them is right;
    or that step waits for the row, and the device for the host. Rows for which nothing was found, or was right, are
    looked at less and less often.

    `model` is asked about rows of which the sources know less than it is expected to, where its own time pays.

    `most_drafts`: of a row in a step; None: as many as are looked for.
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
        self._times, self._looks_ahead, self._clock = times, looks_ahead, clock
        self._most_sampled, self._acceptance = most_sampled, Acceptance()
        # Whether a row with drafts misses no step: nothing was in flight when the newest one was planned
        self._together = not looks_ahead
        self._rows: dict[Sequence, _Row] = {}
        self._turn = 0  # which of the rows is looked at first
        self._search_s = 0.0  # of looking at a row
        # Seconds that may be spent on looking: a share of the steps, less what was spent, up to a limit
        self._allowed_s = self._most_allowed_s = 0.0
        self._expected_prompt_tokens = 0  # in the next step: those of the newest one, while sequences wait
        self._pays = False  # whether drafts may pay in the next step
        self._host_s = 0.0  # that the device waits for the host where the next step has drafts
        self._at_once = (
            1.0  # steps without drafts that the host launches together, in the mean of the newest ones
        )
        # Of each source, drafts that were verified since the last sample, and right ones
        self._counts: dict[str, tuple[int, int]] = {}

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Drafts]]:
        """Return the drafts of those of these rows that get any in the next step; see `Drafter`. All that this takes
        counts as looking for drafts."""
        began = self._clock()
        decodes, others = len(rows) + ahead, max(others, self._expected_prompt_tokens)
        # Nothing is in flight, so that the step behind may wait for this one, too
        if decodes and self._looks_ahead:
            self._together = not ahead and not others
            self._host_s = host_seconds(decodes) if self._together else 0.0
        self._pays = decodes > 0 and self._may_pay(decodes, others)
        asked = self._asked(rows) if self._pays else []
        found = self._found(asked) if asked else []
        self._allowed_s -= self._clock() - began
        if self._pays and self._model is not None:
            found = self._with_model(self._model, rows, found, decodes, others)
        began = self._clock()
        chosen = self._best(found, decodes, others) if found else []
        given = {sequence for sequence, _ in chosen}
        for row in asked if not self._together else ():
            if row not in given:  # it waited for nothing
                self._rows[row].texts.failed(len(row), self._patience)
        self._allowed_s -= self._clock() - began
        return chosen

    def waits(self, sequence: Sequence) -> bool:
        """Whether a row's drafts were right lately, or it is time to look; see `Drafter`."""
        if not self._pays:
            return False
        row = self._rows.get(sequence)
        if self._model is not None and self._model.paid and (row is None or row.model.over(len(sequence))):
            return True
        if self._search_s and self._allowed_s < self._search_s:
            return False
        return row is None or row.texts.over(len(sequence))

    def holds(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        """Whether one step of all rows, for which the device waits, gives more tokens a second than one of those that
        can run now and one of the others; see `Drafter`."""
        if self._expected_prompt_tokens or not plain + len(ready):
            return False
        return waiting_pays(self._plain_seconds, self._decoding(waiting), self._decoding(ready), plain)

    def _plain_seconds(self, rows: int, drafts: int) -> float:
        return self._times.seconds(rows, 0, drafts)

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
        return 4 if self._together else 0

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
        waited_s = self._host_s if sample.drafted_tokens else 0.0
        if not sample.drafted_tokens:
            self._at_once += _NEWEST * (sample.launched_steps - self._at_once)
        steps_s = max(0.0, sample.duration_s - spent_s)
        if spent_s or waited_s:
            self._times.measured(replace(sample, duration_s=max(steps_s / 2, steps_s - waited_s)))
        else:
            self._times.measured(sample)
        self._acceptance.fade(_FADED)
        if self._model is not None:
            self._model.fade(_FADED)
        share = SHARE * (steps_s + max(0.0, sample.drafts_saved_s or 0.0))
        self._most_allowed_s = _SAVED_STEPS * share
        self._allowed_s = min(self._allowed_s + share, self._most_allowed_s)
        self._expected_prompt_tokens = sample.prefill_tokens if sample.waiting else 0
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
        saved_s = self._saved_s(sample, accepted, spent_s)
        return found | {"drafted_tokens": drafted, "accepted_tokens": accepted, "drafts_saved_s": saved_s}

    def _saved_s(self, sample: StepSample, accepted: int, spent_s: float) -> float | None:
        """Return the seconds of a step's tokens without drafts, less those of the step; None if not known yet.

        Without drafts, its accepted tokens would have taken further steps. None of them would have been longer than
        this one, which ran more tokens.
        """
        rows = max(1, sample.sampled_tokens - accepted)
        first_s = self._times.typical_seconds(rows, sample.prefill_tokens)
        further_s = self._times.typical_seconds(rows, 0)
        if first_s is None or further_s is None:
            return None
        most_s = max(0.0, sample.duration_s - spent_s)
        without_s = min(first_s, most_s) + accepted / rows * min(further_s, most_s)
        return without_s - sample.duration_s

    def _may_pay(self, rows: int, others: int) -> bool:
        """Whether drafts would pay if all of them were right: then none is looked for where steps are bound by
        arithmetic."""
        least = LEAST_GAIN * rows / self._seconds(rows, others, 0)
        tried = {max(1, rows // 4), rows, 2 * rows, 4 * rows}
        return any((rows + n) / self._seconds(rows, others, n) > least for n in tried)

    def _seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the seconds of the next step, with so many drafts. The host prepares it while the one before runs,
        unless that has to be known for the drafts."""
        took = self._times.seconds(decodes, others, drafts)
        if not self._looks_ahead:
            return took
        if drafts and self._together:
            return took + host_seconds(decodes)
        return max(took, host_seconds(decodes, 1.0 if drafts or others else self._at_once))

    def _asked(self, rows: Seq[Sequence]) -> list[Sequence]:
        """Return the rows that are looked at now, in turn, as many as there is time for."""
        ready = [row for row in rows if self._row(row).texts.over(len(row))]
        most = len(ready)
        if self._search_s > 0:
            most = int(max(0.0, self._allowed_s) / self._search_s)
            if not most and self._allowed_s >= self._most_allowed_s:
                most = 1  # or nothing would show that looking takes less by now
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
        each = (self._clock() - began) / len(rows)
        self._search_s += 0.2 * (each - self._search_s) if self._search_s else each
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
        seconds = self._seconds
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
        lengths, seconds = np.minimum(lengths, self._most_drafts), self._seconds
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
        if self._looks_ahead and each and not (self._together and self._would_hold(each, decodes)):
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
        return waiting_pays(self._plain_seconds, drafted, NOBODY, decodes - len(chosen))

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
