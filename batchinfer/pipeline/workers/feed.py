"""Feeds the requests of a plan to the engines, and passes their answers to a sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineInfo
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkDone
from batchinfer.plan.order.plan import PlanBatch

POLL_S = 0.1
DRAIN_S = 15.0  # how long running requests may take to finish after a signal
LATE_S = 3.0  # a worker only reads messages between steps, and a step may be long


class Engines(Protocol):
    """The engines of a run, for the feeder. See ReplicaPool for the methods."""

    @property
    def info(self) -> EngineInfo | None:
        """Return an engine that is ready, or None."""

    @property
    def left(self) -> bool:
        """Return True if all engines have left."""

    @property
    def wants_more(self) -> bool:
        """Return True if the next batch should be submitted."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the next requests of the plan."""

    def exhausted(self) -> None:
        """Handle the end of the plan."""

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the results that have arrived, after waiting for at most `timeout_s` if there are none."""

    def finish(self, within_s: float) -> None:
        """Let the engines finish running requests within `within_s` seconds, and leave."""


class Sink(Protocol):
    """Receives the answers of engines."""

    def planned(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Register the requests of a batch, which are submitted next in this order."""

    def take(self, done: WorkDone) -> None:
        """Take completions and samples of an engine."""

    def enough(self) -> bool:
        """Return True to stop early, because the rest of the plan cannot change the outcome."""

    def tick(self) -> None:
        """Do periodic work that is due."""


Batches = Iterator[tuple[PlanBatch, list[Request]]]


class Plans(Protocol):
    """The plans that follow the first one."""

    @property
    def to_come(self) -> bool:
        """Return True if another plan may follow, whatever the answers in flight are."""

    def next(self, exhausted: bool, idle: bool) -> Batches | None:
        """Return the batches that replace the rest of the current plan, or None to continue with it.

        Args:
            exhausted: Whether all requests of the current plan were submitted.
            idle: Whether, in addition, no request is in flight.
        """


class OnePlan:
    """The plans of a run that only has its first plan."""

    to_come = False

    def next(self, exhausted: bool, idle: bool) -> None:
        """Continue with the current plan."""


def run_plan(
    batches: Batches,
    engines: Engines,
    sink: Sink,
    interrupts: Interrupts,
    draining: Callable[[float], None],
    plans: Plans | None = None,
) -> None:
    """Run the requests of a plan and of later plans, until all are answered, `sink` has enough, or a signal comes.

    After a signal, or when `sink` has enough, running requests have DRAIN_S seconds to finish.

    Args:
        batches: The batches of the first plan in order.
        engines: The engines.
        sink: Receives the answers.
        interrupts: The signals of the run.
        draining: Called after a signal with the seconds that running requests may take.
        plans: The plans that follow the first one.

    Raises the error that ended the last engine.
    """
    in_flight, more, plans = 0, True, plans or OnePlan()
    while more or in_flight or plans.to_come:
        if interrupts.pending is not None:
            # without `info` the engines are still loading, so no request can finish
            if in_flight and engines.info is not None:
                draining(DRAIN_S)
                _drain(engines, sink)
            return
        if sink.enough():
            break  # running requests are drained and stored for a later run
        while more and engines.wants_more:
            read = next(batches, None)
            if read is None:
                more = False
                engines.exhausted()
                break
            batch, requests = read
            sink.planned(batch, requests)
            engines.submit(requests)
            in_flight += len(requests)
        for done in engines.receive(POLL_S):
            in_flight -= len(done.completions)
            sink.take(done)
        sink.tick()
        if (following := plans.next(not more, not more and not in_flight)) is not None:
            batches, more = following, True
    _drain(engines, sink)


def _drain(engines: Engines, sink: Sink) -> None:
    """Let the engines finish running requests and leave. Engines that do not leave in time end when they are closed."""
    engines.finish(DRAIN_S)
    give_up = time.monotonic() + DRAIN_S + LATE_S
    while not engines.left and time.monotonic() < give_up:
        for done in engines.receive(POLL_S):
            sink.take(done)
        sink.tick()
