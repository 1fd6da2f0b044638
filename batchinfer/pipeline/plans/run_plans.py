"""Makes plans while engines run. Each plan replaces the rest of the plan before."""

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
from batchinfer.pipeline.plans.earlier_drafts import AddDrafts, without_drafts
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.plan.order.requests import Prompts, read_requests
from batchinfer.store.answers.completion_store import CompletionStore


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan of the requests that no engine has received yet."""

    plan: Plan
    prompts: Prompts
    add_drafts: AddDrafts = without_drafts  # adds drafts to its requests


class Source(Protocol):
    """Decides when another plan is made, and makes it."""

    @property
    def to_come(self) -> bool:
        """Return True if another plan will follow, whatever the answers in flight are."""

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Return True if a plan should be made now.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Whether no request is in flight.
        """

    def plan(self, known: Snapshot) -> Replanned | None:
        """Make a plan, in another thread. Return None if engines should keep the current plan."""

    def follows(self, found: Replanned, known: Snapshot) -> None:
        """Handle the switch of engines to this plan."""


class RunPlans:
    """The plans of a run after the first one, see `Plans` in feed.py.

    A context manager, which waits at its end for a plan that is being made.
    """

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
        """Add a source of plans."""
        self._sources.append(source)

    @property
    def to_come(self) -> bool:
        """Return True if another plan may follow, whatever the answers in flight are."""
        return self._making is not None or any(source.to_come for source in self._sources)

    def next(self, exhausted: bool, idle: bool) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        """Start to make a plan if one is due, and return the requests of a new plan when it is ready.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Whether no request is in flight.

        Returns:
            The batches of the new plan, or None to continue with the current plan.

        Raises the error of planning.
        """
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
        return found.add_drafts(read_requests(plan, found.prompts, REQUEST_BATCH, roots, without=given))
