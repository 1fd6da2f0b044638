"""Asks all sources for drafts, and takes as many as it pays to verify."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.drafts.acceptance import Acceptance
from batchinfer.engine.drafts.source import DraftSource, Proposal
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.drafts.worth import LEAST_GAIN, drafts_worth
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.sequence import Sequence

MOST_DRAFTS = 24  # of a row in a step
SHARE = 0.05  # of a step's time, which looking for drafts takes at most
_LONGEST_PAUSE = 32  # tokens, after a row's text turned out to have nothing to offer
_SAVED_STEPS = 20  # of whose time the share may be spent at once
_FADED = 0.002  # of what was measured, with each step


@dataclass(slots=True)
class _Row:
    """The state of a row whose drafts are looked for."""

    pause: int = 0  # tokens for which the row is left alone, the next time that nothing comes of it
    resumes: int = 0  # the length from which on it is looked at again
    source: str = ""  # of its newest drafts
    proposal: Proposal | None = None

    def failed(self, length: int) -> None:
        self.pause = min(_LONGEST_PAUSE, 2 * self.pause + 1)
        self.resumes = length + self.pause

    def succeeded(self) -> None:
        self.pause = self.resumes = 0


class CostedDrafter:
    """Proposes the drafts with which a step is expected to give the most tokens a second.

    `most_sampled`: rows of a step that are sampled, drafts included: each may have logits of its own.

    `looks_ahead`: a row with drafts is left out of every second step, so that one of them has to be right for it to
    lose nothing. Rows for which nothing was found, or was right, are looked at less and less often.
    """

    def __init__(
        self,
        sources: Seq[DraftSource],
        times: DraftedStepTimes,
        most_sampled: int,
        looks_ahead: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sources, self._times, self._looks_ahead, self._clock = sources, times, looks_ahead, clock
        self._most_sampled, self._acceptance = most_sampled, Acceptance()
        self._rows: dict[Sequence, _Row] = {}
        self._turn = 0  # which of the rows is looked at first
        self._search_s = 0.0  # of looking at a row
        self._allowed_s = 0.0  # that may be spent on looking: a share of the steps, less what was spent
        self._reading = 0  # tokens of prompts in the newest step, while sequences waited
        # Of each source, drafts that were verified since the last sample, and right ones
        self._counts: dict[str, tuple[int, int]] = {}

    def propose(self, rows: Seq[Sequence], others: int) -> Iterable[tuple[Sequence, Seq[int]]]:
        """Return the drafts of those of these rows that get any in the next step; see `Drafter`."""
        others = max(others, self._reading)
        if len(rows) >= self._most_sampled or not self._may_pay(len(rows), others):
            return []
        asked = self._asked(rows)
        found = self._found(asked) if asked else []
        if not found:
            return []
        rates = np.array([self._acceptance.rate(source, p) for _, source, p in found])
        lengths = np.array([len(p.tokens) for _, _, p in found], np.int64)
        counts = drafts_worth(
            rates,
            lengths,
            lambda drafts: self._times.seconds(len(rows), others, drafts),
            len(rows),
            self._most_sampled - len(rows),
        )
        return [
            self._chosen(sequence, source, proposal, count)
            for (sequence, source, proposal), count in zip(found, counts.tolist(), strict=True)
            if count > (1 if self._looks_ahead else 0)
        ]

    def waits(self, sequence: Sequence) -> bool:
        """Whether a row's drafts were right lately, or it is time to look; see `Drafter`."""
        row = self._rows.setdefault(sequence, _Row())
        return len(sequence) >= row.resumes and self._may_pay(1, max(0, self._reading))

    def verified(self, taken: AcceptedTokens) -> None:
        """Count a row's drafts, and those that were right."""
        row = self._rows[taken.sequence]
        assert row.proposal is not None, "drafts that nobody proposed"
        drafts = len(taken.drafts)
        self._acceptance.verified(row.source, row.proposal, drafts, taken.right)
        before = self._counts.get(row.source, (0, 0))
        self._counts[row.source] = (before[0] + drafts, before[1] + taken.right)
        if taken.right:
            row.succeeded()
        else:
            row.failed(len(taken.sequence))

    def ended(self, sequence: Sequence) -> None:
        """Let the sources learn an answer."""
        self._rows.pop(sequence, None)
        for source in self._sources:
            source.learn(sequence)

    def learn(self, answer: TokenIds) -> None:
        """Let the sources learn an answer of another engine."""
        for source in self._sources:
            source.add(array("i", answer.tobytes()))

    def stepped(self, sample: StepSample) -> StepSample:
        """Learn how long a step took; the sample with what its drafts came to."""
        if self._counts:
            sample = replace(sample, **self._counted(sample))
            self._counts = {}
        self._times.measured(sample)
        self._acceptance.fade(_FADED)
        share = SHARE * sample.duration_s
        self._allowed_s = min(self._allowed_s + share, _SAVED_STEPS * share)
        self._reading = sample.prefill_tokens if sample.waiting else 0
        return sample

    def _counted(self, sample: StepSample) -> dict[str, Any]:
        """Return the fields of a step's sample that say what its drafts came to. Without drafts its tokens would have
        taken so many more steps as it gave tokens for each that decoded."""
        found: dict[str, Any] = {}
        for source, (drafted, accepted) in self._counts.items():
            found |= {f"{source}_drafted": drafted, f"{source}_accepted": accepted}
        drafted, accepted = (sum(column) for column in zip(*self._counts.values(), strict=True))
        rows = max(1, sample.sampled_tokens - accepted)
        alone = self._times.seconds(rows, sample.prefill_tokens, 0)
        saved = alone + accepted / rows * self._times.seconds(rows, 0, 0) - sample.duration_s
        return found | {"drafted_tokens": drafted, "accepted_tokens": accepted, "drafts_saved_s": saved}

    def _may_pay(self, rows: int, others: int) -> bool:
        """Whether drafts would pay if all of them were right: then none is looked for where steps are bound by
        arithmetic."""
        least = LEAST_GAIN * rows / self._times.seconds(rows, others, 0)
        tried = {max(1, rows // 4), rows, 2 * rows, 4 * rows}
        return any((rows + n) / self._times.seconds(rows, others, n) > least for n in tried)

    def _asked(self, rows: Seq[Sequence]) -> list[Sequence]:
        """Return the rows that are looked at now, in turn, as many as there is time for."""
        ready = [row for row in rows if len(row) >= self._rows.setdefault(row, _Row()).resumes]
        most = len(ready)
        if self._search_s > 0:
            most = max(0, int(self._allowed_s / self._search_s))
        if most >= len(ready):
            return ready
        self._turn = (self._turn + most) % len(ready)  # whose turn it was not is next
        return [*ready[self._turn :], *ready[: self._turn]][:most]

    def _found(self, rows: list[Sequence]) -> list[tuple[Sequence, str, Proposal]]:
        """Return the most promising proposal for each row that has any."""
        began = self._clock()
        best: dict[Sequence, tuple[float, str, Proposal]] = {}
        for source in self._sources:
            for row, proposal in zip(rows, source.propose(rows, MOST_DRAFTS), strict=True):
                if proposal is None:
                    continue
                rate = self._acceptance.rate(source.name, proposal)
                value = _expected(rate, len(proposal.tokens))
                if row not in best or value > best[row][0]:
                    best[row] = (value, source.name, proposal)
        for row in rows:
            if row not in best:
                self._rows[row].failed(len(row))
        took = self._clock() - began
        self._allowed_s -= took
        each = took / len(rows)
        self._search_s += 0.2 * (each - self._search_s) if self._search_s else each
        return [(row, source, proposal) for row, (_, source, proposal) in best.items()]

    def _chosen(
        self, sequence: Sequence, source: str, proposal: Proposal, count: int
    ) -> tuple[Sequence, Seq[int]]:
        row = self._rows[sequence]
        row.source, row.proposal = source, proposal
        return sequence, proposal.tokens[:count]


def _expected(rate: float, tokens: int) -> float:
    """Return how many of a proposal's tokens are expected to be right."""
    return rate * (1 - rate**tokens) / (1 - rate)
