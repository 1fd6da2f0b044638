"""Plans rows in waves, while the rest of the input is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from batchinfer.core.wording import counted, percent
from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.background_reading import BackgroundReading
from batchinfer.pipeline.plans.earlier_drafts import AddDrafts, EarlierDrafts, without_drafts
from batchinfer.pipeline.plans.run_plans import Replanned
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.plan.forecast.run import RunForecast, add_earlier_answers, forecast_run
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.index.index import Index
from batchinfer.store.index.token_store import TokenStore
from batchinfer.store.results.planned_work import Announcement

# A wave is planned when the engines have work left for LEAD times the time of the last plan, or for LEAD_S seconds.
LEAD, LEAD_S = 4.0, 2.0  # chosen, not measured
PAUSE = 5  # minimum time between two plans, in units of the time of the last plan; chosen, not measured
# The largest share of a job's prompt tokens that waves may compute again. If rows that share a prefix are far apart in
# the input, several waves compute that prefix, and engines wait for the whole input instead.
MOST_AGAIN = 0.05


class Waves:
    """Plans the rows of an input in waves: whenever engines need requests, it plans the rows that were read so far.

    Each plan has all requests that no engine has received yet. The last plan is made when the whole input has been
    read.
    """

    def __init__(
        self,
        run: OpenRun,
        reading: BackgroundReading,
        announcement: Announcement,
        on_plan: Callable[[Replanned, Snapshot, Index | None], None],
    ) -> None:
        """Prepare to plan the rows of an input in waves.

        Args:
            run: The run, with its job, options, state folder and report.
            reading: Reads the input.
            announcement: Announces plans to other runs that share the store.
            on_plan: Called when engines switch to a plan: with the plan, the requests that engines had received when it
                was made, and the index. The index is None unless the whole input has been read.
        """
        self._run, self._reading, self._announcement, self._on_plan = run, reading, announcement, on_plan
        self.parts: Sequence[Path] = ()  # planned parts of the index
        self.index: Index | None = None  # set when all rows are planned
        self._followed = False
        self._spread: str | None = None  # the reason why engines wait for all rows; "" after the notice
        self._not_before, self._took_s = 0.0, 0.0
        self._again = 0  # upper bound of the prefix tokens that waves computed again
        self.count = 0  # plans that engines received
        self.forecast = RunForecast()  # of the last plan

    @property
    def will_plan_again(self) -> bool:
        """Return True until engines have switched to a plan with all rows of the input."""
        return not (self._followed and self.index is not None)

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Return True if the whole input has been read and is not planned yet, or if engines will soon lack requests.

        Raises the error that ended the reading.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Not used.
        """
        self._reading.check()
        waits = self._waits()
        if self._reading.ended or not self.will_plan_again:
            return self.will_plan_again
        if waits or time.monotonic() < self._not_before:
            return False
        left_s = self._run.progress.left_of_known_s()
        return exhausted if left_s is None else left_s <= max(LEAD_S, LEAD * self._took_s)

    def plan(self, known: Snapshot) -> Replanned | None:
        """Plan the rows that were read so far. Returns None if engines should wait for more rows.

        They should wait if there is no new request, or if too many prefix tokens would be computed again.

        Args:
            known: The requests that engines have received so far.

        Raises:
            StorageError: The index or the store cannot be read, or a file cannot be written.
            OutOfMemory: DuckDB exceeded its memory limit.
        """
        began = time.monotonic()
        rows = self._reading.rows_so_far()
        if rows is None:
            self.index = self._reading.finish()
            parts, tokens = self.index.index_parts, self.index.tokens
        else:
            parts, tokens = rows.parts, rows.tokens
        plan = self._planned(parts, tokens, known)
        if self.index is not None:
            whole, run = not known.requests, self._run
            forecast = forecast_run(run.job, run.setup, plan, tokens, whole=whole)
            self.forecast = add_earlier_answers(forecast, run.setup, run.state, plan, tokens, known.parts)
        self.parts, add_drafts = parts, self._find_drafts(plan)
        ended = time.monotonic()
        self._took_s, self._not_before = ended - began, ended + PAUSE * (ended - began)
        if self.index is None and (not plan.to_run or self._is_too_spread(plan, known)):
            return None
        self._announcement.add(plan.path)
        return Replanned(plan, tokens, add_drafts)

    def handle_switch(self, found: Replanned, known: Snapshot) -> None:
        """Record that engines switch to a plan, and call `on_plan` with it.

        Args:
            found: The plan.
            known: The requests that engines had received when the plan was made.
        """
        self.count += 1
        self._again += found.plan.again_tokens
        self._followed = True
        self._on_plan(found, known, self.index)

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
            more=self.index is None,
            shares=self._run.setup.setting.parts.shares_prefixes,
            threads=usable_cpus(),
        )

    def _find_drafts(self, plan: Plan) -> AddDrafts:
        drafts = EarlierDrafts.of(self._run) if plan.to_run else None
        return without_drafts if drafts is None else drafts.of_plan(plan, self.parts)

    def _waits(self) -> bool:
        if self._spread:
            self._run.notice(self._spread)
            self._spread = ""
        return self._spread is not None

    def _is_too_spread(self, plan: Plan, known: Snapshot) -> bool:
        at = self._reading.at
        if not self._run.setup.setting.parts.shares_prefixes:
            return False
        again = waves_again(plan, known.requests, self._again, at.bytes_total / max(1, at.bytes_read))
        if again <= MOST_AGAIN:
            return False
        self._spread = (
            f"the engines wait until all rows are read: beginning with {counted(plan.to_run, 'request')} of the first "
            f"{counted(plan.rows, 'row')} would compute {percent(again)} more prompt tokens, because rows that share a "
            "beginning are far apart"
        )
        return True


def waves_again(plan: Plan, begun: int, again: int, ratio: float) -> float:
    """Estimate how many prompt tokens are computed again if engines switch to a plan of the rows read so far.

    Several waves may compute the same shared prefix. A single plan of the whole input would compute it once.

    Args:
        plan: The plan of the rows read so far.
        begun: Number of requests that engines have received so far.
        again: Prefix tokens that earlier waves computed again.
        ratio: Size of the whole input divided by the size of the part that was read.

    Returns:
        The tokens that are computed again, as a share (0 to 1) of all prompt tokens of the job.
    """
    later = (ratio - 1) * plan.rows * (1 - plan.recurring)
    all_tokens = plan.tokens_once / max(1, plan.to_run) * (begun + plan.to_run + later)
    return (again + plan.again_tokens + plan.recurring * plan.tokens_once) / max(1.0, all_tokens)
