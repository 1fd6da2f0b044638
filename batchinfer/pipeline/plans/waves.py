"""Waves: rows that were read are planned and run while the rest of the input is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from batchinfer.core.wording import counted, percent
from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.earlier_drafts import EarlierDrafts, Given, without_drafts
from batchinfer.pipeline.plans.reading_on import ReadingOn
from batchinfer.pipeline.plans.run_plans import Replanned
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.plan.forecast.run import RunForecast, forecast_run
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.index.index import Index
from batchinfer.store.index.token_store import TokenStore
from batchinfer.store.results.planned_work import Announcement

# A wave is planned when what is known takes so many times as long as the last plan took to make, or so many seconds
LEAD, LEAD_S = 4.0, 2.0  # chosen, not measured
PAUSE = 5  # times as long as it took passes before the next one; chosen, too
# Rows that share prefixes with others far away run once all rows are known, where running some before would cost such
# a part of the job's prompt tokens: a wave computes the prefixes of its rows, and a later one computes them again.
MOST_AGAIN = 0.05


class Waves:
    """Plans the rows so far, again and again, until all are known. What engines were not given yet is planned together
    with the rows that were read since; so the last plan is that of the whole rest of the job."""

    def __init__(
        self,
        run: OpenRun,
        reading: ReadingOn,
        announcement: Announcement,
        told: Callable[[Replanned, Snapshot, Index | None], None],
    ) -> None:
        """told: hears of each plan when engines follow it, with the whole index once it is complete."""
        self._run, self._reading, self._announcement, self._told = run, reading, announcement, told
        self._parts: Sequence[Path] = ()  # of the index, as far as it is planned
        self._index: Index | None = None  # once all rows are planned
        self._followed = False
        self._spread: str | None = None  # why engines wait for all rows
        self._not_before, self._took_s = 0.0, 0.0
        self._again = 0  # tokens that they may have run again so far
        self.count = 0  # plans that engines were given
        self.forecast = RunForecast()  # of the last of them

    @property
    def to_come(self) -> bool:
        """Whether there will be a plan: as long as none has all rows."""
        return not (self._followed and self._index is not None)

    @property
    def index(self) -> Index | None:
        """The index, once all rows are planned."""
        return self._index

    @property
    def parts(self) -> Sequence[Path]:
        """The parts of the index whose rows are planned."""
        return self._parts

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Whether to plan the rows so far: all of them, or because engines will soon have run what was planned. Raises
        what ended the reading."""
        self._reading.check()
        waits = self._waits()
        if self._reading.ended or not self.to_come:
            return self.to_come
        if waits or time.monotonic() < self._not_before:
            return False
        left_s = self._run.progress.left_of_known_s()
        return exhausted if left_s is None else left_s <= max(LEAD_S, LEAD * self._took_s)

    def plan(self, known: Snapshot) -> Replanned | None:
        """Plan the rows so far; None: engines are to wait for more of them. Raises as `Ingestion.finish` and
        `plan_job` do."""
        began = time.monotonic()
        rows = self._reading.rows_so_far()
        if rows is None:
            self._index = self._reading.finish()
            parts, tokens = self._index.index_parts, self._index.tokens
        else:
            parts, tokens = rows.parts, rows.tokens
        plan = self._planned(parts, tokens, known)
        if self._index is not None:
            whole = not known.requests
            self.forecast = forecast_run(self._run.job, self._run.setup, plan, tokens, whole=whole)
        self._parts, given = parts, self._given(plan, known)
        ended = time.monotonic()
        self._took_s, self._not_before = ended - began, ended + PAUSE * (ended - began)
        if self._index is None and (not plan.to_run or self._is_too_spread(plan, known)):
            return None
        self._announcement.add(plan.path)
        return Replanned(plan, tokens, given)

    def follows(self, found: Replanned, known: Snapshot) -> None:
        """Take note that engines follow this plan from now on."""
        self.count += 1
        self._again += found.plan.again_tokens
        self._followed = True
        self._told(found, known, self._index)

    def _planned(self, parts: Sequence[Path], tokens: TokenStore, known: Snapshot) -> Plan:
        ingestion = self._reading.ingestion
        return plan_job(
            parts,
            tokens,
            known.parts,
            ingestion.folder / f"plan-{self.count}",
            self._run.setup.roots,
            attempts=ingestion.job.attempts,
            reused=ingestion.reused,
            in_flight=known.in_flight,
            begun=known.begun,
            more=self._index is None,
            shares=self._run.setup.setting.parts.shares_prefixes,
            threads=usable_cpus(),
        )

    def _given(self, plan: Plan, known: Snapshot) -> Given:
        """Return what gives the requests of a plan their drafts."""
        drafts = EarlierDrafts.of(self._run) if plan.to_run else None
        return without_drafts if drafts is None else drafts.of_plan(plan, self._parts)

    def _waits(self) -> bool:
        """Whether engines wait for all rows; the first time a line says why."""
        if self._spread:
            self._run.notice(self._spread)
            self._spread = ""
        return self._spread is not None

    def _is_too_spread(self, plan: Plan, known: Snapshot) -> bool:
        """Whether so many prefixes are shared by rows far from each other that all others are to be planned at once."""
        at = self._reading.at
        if not self._run.setup.setting.parts.shares_prefixes:
            return False
        again = waves_again(plan, known.requests, self._again, at.bytes_total / max(1, at.bytes_read))
        if again <= MOST_AGAIN:
            return False
        self._spread = (
            f"the engines wait until all rows are read: beginning with {counted(plan.to_run, 'request')} of the first "
            f"{counted(plan.rows, 'row')} would compute {percent(again)} more prompt tokens, because rows that share a "
            "beginning lie far apart"
        )
        return True


def waves_again(plan: Plan, begun: int, again: int, times: float) -> float:
    """Return the part of a job's prompt tokens that would run again if this plan were followed.

    The plan's are rows of an input that is so many `times` as long, of which `begun` requests ran before. The plans so
    far had `again` tokens to run again. Of rows to come only the tokens are counted that these rows do not have.
    """
    later = (times - 1) * plan.rows * (1 - plan.recurring)
    all_tokens = plan.tokens_once / max(1, plan.to_run) * (begun + plan.to_run + later)
    return (again + plan.again_tokens + plan.recurring * plan.tokens_once) / max(1.0, all_tokens)
