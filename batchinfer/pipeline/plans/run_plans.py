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
    """A plan that is made while engines run. It has the requests that no engine has received yet.

    Attributes:
        plan: The plan.
        prompts: The token ids of its prompts.
        add_drafts: Adds draft tokens to its requests.
    """

    plan: Plan
    prompts: Prompts
    add_drafts: AddDrafts = without_drafts


class Source(Protocol):
    """A source of plans: decides when the next plan of a run is made, and makes it."""

    @property
    def will_plan_again(self) -> bool:
        """Return True if the source will certainly make another plan, whatever the next answers are."""

    def is_due(self, exhausted: bool, idle: bool) -> bool:
        """Return True if the source should make a plan now.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Whether engines have answered all requests that they received.
        """

    def plan(self, known: Snapshot) -> Replanned | None:
        """Make a plan. Returns None if engines should keep the current plan. Runs in another thread.

        Args:
            known: The requests that engines have received so far.
        """

    def handle_switch(self, found: Replanned, known: Snapshot) -> None:
        """Act on a switch of the engines to a plan of this source, for example by updating the progress display.

        Args:
            found: The plan.
            known: The requests that engines had received when the plan was made.
        """


class RunPlans:
    """Makes the plans of a run after the first one, in another thread.

    A context manager, which waits at the end of its block for a plan that is being made. It has the interface `Plans`
    that `run_plan` needs.
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
        """Add a source of further plans."""
        self._sources.append(source)

    @property
    def will_plan_again(self) -> bool:
        """Return True if a plan is being made or will certainly be made, whatever the next answers are."""
        return self._making is not None or any(source.will_plan_again for source in self._sources)

    def next(self, exhausted: bool, idle: bool) -> Iterator[tuple[PlanBatch, list[Request]]] | None:
        """Start to make a plan if one is due. If a plan is ready, return its requests, which replace the current plan.

        Requests that engines received while the plan was made are left out.

        Args:
            exhausted: Whether engines have received all requests of the current plan.
            idle: Whether engines have answered all requests that they received.

        Returns:
            Batches of the new plan's requests. None: engines keep the current plan.

        Raises:
            BatchInferError: The plan cannot be made.
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
        given = self._collector.submitted_since(known)
        plan = found.plan
        self._pool.expect(plan.to_run - len(given))
        source.handle_switch(found, known)
        roots = self._run.setup.roots
        return found.add_drafts(read_requests(plan, found.prompts, REQUEST_BATCH, roots, without=given))
