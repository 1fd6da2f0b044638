"""Further attempts of rows whose answers were not valid: planned while engines run the last of what was planned."""

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

# A plan reads the whole index. So this many times as long passes before the next one, unless the engines have nothing
# to do.
PAUSE = 10


class FurtherAttempts:
    """Plans the rows that run again, whenever engines could run more than was planned. Which attempt of a row is next
    follows from the index and the store alone, as it does for a later run."""

    to_come = False  # they follow from answers

    def __init__(self, run: OpenRun, index: Index, collector: Collector, pool: ReplicaPool) -> None:
        self._run, self._index, self._collector, self._pool = run, index, collector, pool
        self._told = False
        self._not_before = 0.0

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Whether there are rows that run again, as far as answers tell, and it is time to plan them."""
        if self._index.attempts == 1 or not self._collector.invalid or not exhausted:
            return False
        return idle or (time.monotonic() >= self._not_before and self._pool.has_room)

    def plan(self, known: Snapshot) -> Replanned | None:
        """Plan the attempts that are due, if there are some. Raises as `plan_job` does."""
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

    def follows(self, found: Replanned, known: Snapshot) -> None:
        """Count the tokens that the attempts add, and tell of the first ones."""
        plan = found.plan
        self._run.progress.more(prompt_tokens=plan.prompt_tokens, expected_tokens=plan.expected_tokens)
        if not self._told:
            self._told = True
            what = counted(plan.to_run, "request")
            self._run.notice(
                f"on_invalid: {what} of rows whose answers were not valid run again, and more may"
            )

    @property
    def _folder(self) -> Path:
        return self._index.folder / "plan-of-further-attempts"  # the one before is read to its end
