"""Further attempts of rows whose answers were not valid: planned while engines run the last of what was planned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.request import Request
from batchinfer.core.wording import counted
from batchinfer.data.index.index import Index
from batchinfer.data.store.completion_store import CompletionStore
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.stages.open_run import OpenRun
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.order.plan import PlanBatch
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.requests import planned_requests

# A plan reads the whole index, and nothing is received meanwhile. So this many times as long passes before the next
# one, unless the engines have nothing to do.
PAUSE = 10


class FurtherAttempts:
    """Plans the rows that run again, whenever engines could run more than was planned. Which attempt of a row is next
    follows from the index and the store alone, as it does for a later run."""

    def __init__(
        self, run: OpenRun, index: Index, store: CompletionStore, collector: Collector, pool: ReplicaPool
    ) -> None:
        self._run, self._index, self._store = run, index, store
        self._collector, self._pool = collector, pool
        self._told = False
        self._not_before = 0.0

    def __call__(self, idle: bool) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        """Return the requests of rows that run again, if there are any and it is time to plan them. `idle`: nothing is
        in flight."""
        if self._index.attempts == 1 or not self._collector.invalid or not (idle or self._is_due()):
            return None
        began = time.monotonic()
        found = self._planned()
        ended = time.monotonic()
        self._not_before = ended + PAUSE * (ended - began)
        return found

    def _is_due(self) -> bool:
        return time.monotonic() >= self._not_before and self._pool.has_room

    def _planned(self) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        run, index = self._run, self._index
        self._store.commit()
        in_flight = self._collector.plans_again()
        plan = plan_job(
            index.index_dir,
            index.tokens,
            self._store.parts(),
            self._folder,
            run.setup.roots,
            attempts=index.attempts,
            in_flight=in_flight,
            threads=usable_cpus(),
        )
        if not plan.to_run:
            return None
        self._tell(plan.to_run)
        self._pool.expect(plan.to_run)
        run.progress.more(prompt_tokens=plan.prompt_tokens, expected_tokens=plan.expected_tokens)
        return planned_requests(plan, index.tokens, REQUEST_BATCH, run.setup.roots)

    @property
    def _folder(self) -> Path:
        return self._index.folder / "plan-of-further-attempts"  # the one before is read to its end

    def _tell(self, requests: int) -> None:
        if not self._told:
            self._told = True
            what = counted(requests, "request")
            self._run.notice(
                f"on_invalid: {what} of rows whose answers were not valid run again, and more may"
            )
