"""Queries all sources for drafts and chooses how many of them the next step verifies."""

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
from batchinfer.engine.drafts.backoff import Backoff, SearchBudget
from batchinfer.engine.drafts.draft_value import NO_ROWS, Decoding, choose_draft_counts, is_waiting_faster
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.source import CONTEXT_TOKENS, MOST_DRAFTS, DraftSource, Proposal
from batchinfer.engine.drafts.step_costs import StepCosts
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.loop.drafting import Drafts
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.sequence import Sequence

# Tokens that a source is queried for. Twice the drafts of a step, to have enough left after a rejected draft
_MOST_FOUND = 2 * MOST_DRAFTS
_PENALISED_TOKENS = 1 << 16  # maximum total length of the texts that penalties need for a row's drafts
# Accepted drafts that make up for a missed step, if a row with drafts misses the next one
_MIN_EXPECTED = 1.1
_SUFFICIENT = 6.0  # expected accepted tokens of a row from which on no further source is queried
_DECAY = 0.002  # share of the acceptance counts that each step forgets


_Found = tuple[Sequence, str, Proposal]


@dataclass(slots=True)
class _Row:
    """The draft state of a sequence. Both proposals are None before the first drafts.

    Attributes:
        texts: The back-off of the sources that search texts.
        model: The back-off of the draft model.
        source: The name of the source of the newest drafts.
        proposal: The proposal that the newest drafts were taken from.
        rest: The proposed tokens after the newest rejected draft, or None. They may be right if a copied text differs
            in one token.
        drafts: The number of the newest drafts.
        expected: The expected number of accepted tokens among the newest drafts.
    """

    texts: Backoff
    model: Backoff
    source: str = ""
    proposal: Proposal | None = None
    rest: Proposal | None = None
    drafts: int = 0
    expected: float = 0.0


class CostedDrafter:
    """A drafter that chooses drafts from several sources to maximise the expected tokens per second of a step.

    A row is a running sequence. Searching texts may take only a small share of the steps' time. A row whose drafts
    were missing or rejected is queried with exponentially decreasing frequency.

    Args:
        sources: The sources that search texts, in the order in which they are queried.
        times: Estimates the duration of steps on the device.
        most_sampled: Maximum number of sampled positions per step, drafts included.
        looks_ahead: True if the host prepares a step while the previous step runs. A row of the previous step then
            gets no drafts for the next step, because its newest tokens are not known yet.
        clock: Returns the time in seconds.
        model: The draft model, or None. It is queried for rows without a good proposal from `sources`, if the expected
            gain exceeds the time that it takes.
        most_drafts: Maximum number of drafts per row and step. None: 24.
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
        self._costs, self._search = StepCosts(times, looks_ahead), SearchBudget()
        self._looks_ahead, self._clock = looks_ahead, clock
        self._most_sampled, self._acceptance = most_sampled, Acceptance()
        self._rows: dict[Sequence, _Row] = {}
        self._turn = 0  # index of the row that is searched first
        self._pays = False  # True if drafts can make the next step more efficient
        # Verified and accepted drafts since the last sample, per source
        self._counts: dict[str, tuple[int, int]] = {}

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Drafts]]:
        """Return the rows that get drafts in the next step, with their drafts.

        Args:
            rows: Decoding sequences whose tokens are all known and that have no drafts yet.
            ahead: The number of other decoding sequences, whose newest tokens are in flight.
            others: The number of tokens that sequences in prefill run in the step.
        """
        began = self._clock()
        decodes, others = len(rows) + ahead, max(others, self._costs.prompt_tokens)
        self._costs.record_plan(decodes, ahead, others)
        self._pays = decodes > 0 and self._costs.can_pay_off(decodes, others)
        searched = self._rows_to_search(rows) if self._pays else []
        found = self._search_rows(searched) if searched else []
        self._search.subtract(self._clock() - began)
        if self._pays and self._model is not None:
            found = self._with_model(self._model, rows, found, decodes, others)
        began = self._clock()
        chosen = self._choose(found, decodes, others) if found else []
        given = {sequence for sequence, _ in chosen}
        for row in searched if not self._costs.together else ():
            if row not in given:  # its search cost a step without any result
                self._rows[row].texts.record_failure(len(row), self._tolerated_failures)
        self._search.subtract(self._clock() - began)
        return chosen

    def should_hold_row(self, sequence: Sequence) -> bool:
        """Return True if a sequence in flight should skip the next step, to have drafts in the step after it.

        The next step is launched before the sequence's newest tokens are known, so the sequence can have no drafts in
        the next step.
        """
        if not self._pays:
            return False
        row = self._rows.get(sequence)
        if (
            self._model is not None
            and self._model.was_queried
            and (row is None or row.model.is_over(len(sequence)))
        ):
            return True
        if self._search.is_spent:
            return False
        return row is None or row.texts.is_over(len(sequence))

    def should_hold_step(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        """Return True if the next step should be launched only after the tokens of the step in flight are known.

        This is the case if one step of all rows yields more tokens per second than two separate steps.

        Args:
            waiting: The sequences in flight that can have drafts when their tokens are known.
            ready: The decoding sequences that are not in flight.
            plain: The number of sequences in flight that run in the next step, without drafts, before their tokens are
                known.
        """
        if self._costs.prompt_tokens or not plain + len(ready):
            return False
        return is_waiting_faster(
            self._costs.device_seconds, self._decoding(waiting), self._decoding(ready), plain
        )

    def _decoding(self, rows: Seq[Sequence]) -> Decoding:
        states = [self._rows[row] for row in rows if row in self._rows]
        return Decoding(
            len(rows), sum(one.drafts for one in states), len(rows) + sum(one.expected for one in states)
        )

    @property
    def _tolerated_failures(self) -> int:
        # After a changed word of a copied text, no draft is found for a few tokens. If rows skip a step to have drafts,
        # a failure costs a whole step, so back-off starts at the first failure.
        return 4 if self._costs.together else 0

    def record_verified(self, outcome: AcceptedTokens) -> None:
        """Learn from a step that verified drafts of a sequence.

        The acceptance rate of the draft source and the back-off of the sequence are updated.

        Args:
            outcome: The drafts that the step ran for the sequence, and which of them were accepted.
        """
        row = self._rows[outcome.sequence]
        assert row.proposal is not None, "drafts without a proposal"
        drafts = len(outcome.drafts)
        if row.proposal.tree is None:
            self._acceptance.record_verified(row.source, row.proposal, drafts, outcome.accepted)
        elif self._model is not None:
            self._model.record_verified(row.proposal.tree, outcome)
        before = self._counts.get(row.source, (0, 0))
        self._counts[row.source] = (before[0] + drafts, before[1] + outcome.accepted)
        computed = self._model is not None and row.source == self._model.name
        rest = () if computed else row.proposal.tokens[outcome.accepted + 1 :]
        row.rest = Proposal(rest, 1) if outcome.accepted < drafts and len(rest) else None
        backoff = row.model if computed else row.texts
        if outcome.accepted:
            backoff.reset()
        else:
            backoff.record_failure(len(outcome.sequence), self._tolerated_failures)

    def finish(self, sequence: Sequence) -> None:
        """Delete the state of a sequence that has ended, and add its answer to the texts that sources search."""
        self._rows.pop(sequence, None)
        if self._model is not None:
            self._model.finish(sequence)
        if sequence.output_length:
            self._learn(sequence.tokens[max(0, sequence.prompt_length - CONTEXT_TOKENS) :])

    def learn(self, answer: TokenIds) -> None:
        """Add an answer that another engine generated to the texts that sources search."""
        self._learn(array("i", answer.tobytes()))

    def record_step(self, sample: StepSample) -> StepSample:
        """Learn from the duration of a step.

        Args:
            sample: The measurements of the step.

        Returns:
            The sample with its draft fields filled: verified and accepted drafts, the time spent on proposals, and the
            time that drafts saved.
        """
        spent_s = 0.0 if self._model is None else self._model.take_spent_s()
        if self._counts:
            sample = replace(sample, **self._counted(sample, spent_s))
            self._counts = {}
        if spent_s:
            saved_s = sample.drafts_saved_s if sample.drafted_tokens else -spent_s
            sample = replace(sample, proposing_s=spent_s, drafts_saved_s=saved_s)
        steps_s = max(0.0, sample.duration_s - spent_s)
        self._costs.record_time(sample, steps_s)
        self._acceptance.fade(_DECAY)
        if self._model is not None:
            self._model.fade(_DECAY)
        self._search.record_step(steps_s + max(0.0, sample.drafts_saved_s or 0.0))
        return sample

    def _learn(self, text: array[int]) -> None:
        for source in self._sources:
            source.learn(text)

    def _counted(self, sample: StepSample, spent_s: float) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for source, (drafted, accepted) in self._counts.items():
            found |= {f"{source}_drafted": drafted, f"{source}_accepted": accepted}
        drafted, accepted = (sum(column) for column in zip(*self._counts.values(), strict=True))
        saved_s = self._costs.saved_s(sample, accepted, spent_s)
        return found | {"drafted_tokens": drafted, "accepted_tokens": accepted, "drafts_saved_s": saved_s}

    def _rows_to_search(self, rows: Seq[Sequence]) -> list[Sequence]:
        ready = [row for row in rows if self._row(row).texts.is_over(len(row))]
        most = self._search.rows(len(ready))
        if most >= len(ready):
            return ready
        self._turn = (self._turn + most) % len(ready)
        return [*ready[self._turn :], *ready[: self._turn]][:most]

    def _search_rows(self, rows: list[Sequence]) -> list[_Found]:
        began = self._clock()
        best: dict[Sequence, tuple[float, str, Proposal]] = {}
        for row, name, proposal in self._proposals(
            rows, lambda row: row in best and best[row][0] >= _SUFFICIENT
        ):
            value = self._value((row, name, proposal))
            if row not in best or value > best[row][0]:
                best[row] = (value, name, proposal)
        for row in rows:
            if row not in best:
                self._rows[row].texts.record_failure(len(row), self._tolerated_failures)
        self._search.record_search(len(rows), self._clock() - began)
        return [(row, source, proposal) for row, (_, source, proposal) in best.items()]

    def _row(self, row: Sequence) -> _Row:
        found = self._rows.get(row)
        if found is None:
            found = self._rows[row] = _Row(Backoff(), Backoff())
        return found

    def _with_model(
        self, model: ModelChoice, rows: Seq[Sequence], found: list[_Found], decodes: int, others: int
    ) -> list[_Found]:
        """Query the draft model for rows whose proposals are missing or weak, if the expected gain exceeds the cost.

        Args:
            model: The draft model.
            rows: The sequences that may have drafts.
            found: The proposals of the sources that search texts.
            decodes: The number of sequences that decode in the step.
            others: The number of tokens that sequences in prefill run in the step.

        Returns:
            `found`, in which proposals of the draft model replace the weak ones.
        """
        ready = [row for row in rows if self._row(row).model.is_over(len(row))]
        rate = self._acceptance.rate(model.name, model.prior)
        queried, kept = model.choose_rows(ready, found, self._value, rate)
        if not queried:
            return found
        seconds = self._costs.seconds
        before = self._expected(found, decodes, others)
        verified, certain = self._expected(kept, decodes, others) if kept else (0, 0.0)
        least = (decodes + before[1]) / seconds(decodes, others, before[0])
        count = model.choose_length(
            queried,
            rate,
            decodes + certain,
            lambda each: seconds(decodes, others, verified + each * len(queried)),
            min(self._most_drafts, (self._most_sampled - decodes - verified) // len(queried)),
            least,
        )
        return [*kept, *model.proposals(queried, count)] if count else found

    def _value(self, found: _Found) -> float:
        _, source, proposal = found
        return proposal.expected_accepted(self._acceptance.rate(source, proposal), len(proposal.tokens))

    def _expected(self, found: list[_Found], decodes: int, others: int) -> tuple[int, float]:
        if not found:
            return 0, 0.0
        rates, counts = self._draft_counts(found, decodes, others)
        return int(counts.sum()), sum(_expected_accepted(found, rates, counts))

    def _draft_counts(
        self, found: list[_Found], decodes: int, others: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        rates = np.array([self._acceptance.rate(source, proposal) for _, source, proposal in found])
        lengths = np.array([_verified(row, proposal) for row, _, proposal in found], np.int64)
        lengths, seconds = np.minimum(lengths, self._most_drafts), self._costs.seconds
        counts = choose_draft_counts(
            rates,
            lengths,
            lambda n: seconds(decodes, others, n),
            decodes,
            self._most_sampled - decodes,
            {at: tree.chances for at, (_, _, one) in enumerate(found) if (tree := one.tree) is not None},
        )
        return rates, counts

    def _choose(self, found: list[_Found], decodes: int, others: int) -> list[tuple[Sequence, Drafts]]:
        rates, counts = self._draft_counts(found, decodes, others)
        expected = _expected_accepted(found, rates, counts)
        each = [one for one in zip(found, expected, counts.tolist(), strict=True) if one[2]]
        if self._looks_ahead and each and not (self._costs.together and self._would_hold(each, decodes)):
            each = [one for one in each if one[1] >= _MIN_EXPECTED]
        return [
            self._chosen(sequence, source, proposal, count, accepted)
            for (sequence, source, proposal), accepted, count in each
        ]

    def _would_hold(self, chosen: list[tuple[_Found, float, int]], decodes: int) -> bool:
        tokens = sum(1 + accepted for _, accepted, _ in chosen)
        drafted = Decoding(len(chosen), sum(n for _, _, n in chosen), tokens)
        if len(chosen) == decodes:
            return True  # no other row could run in the meantime
        return is_waiting_faster(self._costs.device_seconds, drafted, NO_ROWS, decodes - len(chosen))

    def _proposals(
        self, rows: list[Sequence], enough: Callable[[Sequence], bool]
    ) -> Iterator[tuple[Sequence, str, Proposal]]:
        for row in rows:
            state = self._rows[row]
            if state.rest is not None:
                yield row, state.source, state.rest
                state.rest = None
        for source in self._sources:
            queried = [row for row in rows if not enough(row)]
            for row, proposal in zip(queried, source.propose(queried, _MOST_FOUND), strict=True):
                if proposal is not None:
                    yield row, source.name, proposal

    def _chosen(
        self, sequence: Sequence, source: str, proposal: Proposal, count: int, expected: float
    ) -> tuple[Sequence, Drafts]:
        row = self._rows[sequence]
        row.source, row.proposal, row.drafts, row.expected = source, proposal, count, expected
        return sequence, proposal.tokens[:count] if proposal.tree is None else proposal.tree.first(count)


def _expected_accepted(
    found: list[_Found], rates: NDArray[np.float64], counts: NDArray[np.int64]
) -> list[float]:
    each = zip(found, rates.tolist(), counts.tolist(), strict=True)
    return [proposal.expected_accepted(rate, count) for (_, _, proposal), rate, count in each]


def _verified(row: Sequence, proposal: Proposal) -> int:
    # Each draft of a row with penalties needs its own copy of the row's text
    if not row.request.params.has_penalty:
        return len(proposal.tokens)
    return min(len(proposal.tokens), _PENALISED_TOKENS // len(row))
