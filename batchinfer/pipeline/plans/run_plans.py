"""Makes plans while engines run: each takes the place of what is left of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from batchinfer.core.request import Request
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.earlier_drafts import Given, without_drafts
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.plan.order.requests import Prompts, read_requests
from batchinfer.store.answers.completion_store import CompletionStore


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan of what was not given to an engine yet."""

    plan: Plan
    prompts: Prompts
    given: Given = without_drafts  # gives its requests the answers that their rows had before


class Source(Protocol):
    """A reason why there is more to plan."""

    @property
    def to_come(self) -> bool:
        """Whether there will be a plan, whatever becomes of what is in flight."""

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Whether to plan now. `exhausted`: all of the present plan was given to engines; `idle`: nothing is in
        flight."""

    def plan(self, known: Snapshot) -> Replanned | None:
        """Make the plan, in another thread; None: there is none to be followed yet."""

    def follows(self, found: Replanned, known: Snapshot) -> None:
        """Take note that engines follow this plan from now on."""


class RunPlans:
    """The plans of a run after the first one (see `Plans` of the feeder). Leaving it as a context manager waits for the
    one that is being made."""

    def __init__(
        self,
        run: OpenRun,
        store: CompletionStore,
        collector: Collector,
        pool: ReplicaPool,
        sources: Sequence[Source],
    ) -> None:
        self._run, self._store, self._collector, self._pool = run, store, collector, pool
        self._sources = [*sources]
        self._thread = ThreadPoolExecutor(1, "planning")
        self._making: tuple[Source, Snapshot, Future[Replanned | None]] | None = None

    def __enter__(self) -> RunPlans:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown()

    def add(self, source: Source) -> None:
        """Look at one more reason to plan from now on."""
        self._sources.append(source)

    @property
    def to_come(self) -> bool:
        """Whether a plan may come, whatever becomes of what is in flight."""
        return self._making is not None or any(source.to_come for source in self._sources)

    def next(self, exhausted: bool, idle: bool) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        """Return the requests of the plan that is to be followed from now on; None: still the present one. Begins to
        make a plan where one is due. Raises what ended the making."""
        if self._making is not None:
            source, known, made = self._making
            if not made.done():
                return None
            followed = self._followed(source, known, made)
            if followed is not None:
                return followed
        due = next((source for source in self._sources if source.is_due(exhausted, idle)), None)
        if due is not None:
            self._store.commit()
            known = self._collector.snapshot(self._store.parts())
            self._making = due, known, self._thread.submit(due.plan, known)
        return None

    def _followed(
        self, source: Source, known: Snapshot, made: Future[Replanned | None]
    ) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        self._making, found = None, made.result()
        if found is None:
            return None
        given = self._collector.given_since(known)
        plan = found.plan
        self._pool.expect(plan.to_run - len(given))
        source.follows(found, known)
        roots = self._run.setup.roots
        return found.given(read_requests(plan, found.prompts, REQUEST_BATCH, roots, without=given))
