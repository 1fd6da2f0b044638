"""Plans further attempts at rows with invalid answers, while engines finish the plan before."""

from __future__ import annotations

import time
from pathlib import Path

from batchinfer.core.wording import counted
from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.run_plans import Replanned
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.index.index import Index

# Minimum time between two plans, in units of the time of the last plan. A plan reads the whole index.
PAUSE = 10


class FurtherAttempts:
    """Plans further attempts at rows with invalid answers, as soon as engines could run more requests.

    The next attempt of a row is determined from the index and the store alone, so a later run would choose the same.
    """

    will_plan_again = False  # a plan depends on answers to come

    def __init__(self, run: OpenRun, index: Index, collector: Collector, pool: ReplicaPool) -> None:
        self._run, self._index, self._collector, self._pool = run, index, collector, pool
        self._notified = False
        self._not_before = 0.0

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Return True if there are invalid answers and it is time to plan further attempts.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Whether engines have answered all requests that they received.
        """
        if self._index.attempts == 1 or not self._collector.invalid or not exhausted:
            return False
        return idle or (time.monotonic() >= self._not_before and self._pool.has_room)

    def plan(self, known: Snapshot) -> Replanned | None:
        """Plan the next attempts at rows with invalid answers. Returns None if no row has a further attempt.

        Args:
            known: The requests that engines have received so far.
        """
        began = time.monotonic()
        plan = plan_job(
            self._index.index_parts,
            self._index.tokens,
            known.parts,
            self._folder,
            self._run.setup.roots,
            attempts=self._index.attempts,
            in_flight=known.in_flight,
            shares=self._run.setup.setting.parts.shares_prefixes,
            threads=usable_cpus(),
        )
        ended = time.monotonic()
        self._not_before = ended + PAUSE * (ended - began)
        return Replanned(plan, self._index.tokens) if plan.to_run else None

    def handle_switch(self, found: Replanned, known: Snapshot) -> None:
        """Add the attempts of a new plan to the progress display. The user gets a notice about the first new plan.

        Args:
            found: The new plan.
            known: The requests that engines had received when the plan was made.
        """
        plan = found.plan
        self._run.progress.more(prompt_tokens=plan.prompt_tokens, expected_tokens=plan.expected_tokens)
        if not self._notified:
            self._notified = True
            what = counted(plan.to_run, "request")
            self._run.notice(
                f"on_invalid: {what} of rows whose answers were not valid run again, and more may"
            )

    @property
    def _folder(self) -> Path:
        return self._index.folder / "plan-of-further-attempts"  # engines have read the last plan to its end
