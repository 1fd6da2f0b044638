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
    """The interface of the engines of a run, as `run_plan` uses them. ReplicaPool implements it."""

    @property
    def info(self) -> EngineInfo | None:
        """Return the description of an engine that is ready for requests, or None if no engine is ready."""

    @property
    def left(self) -> bool:
        """Return True if all engines have ended as planned or were closed."""

    @property
    def wants_more(self) -> bool:
        """Return True if the next batch of requests should be submitted now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the next requests of the plan."""

    def end_plan(self) -> None:
        """Record that all requests of the current plan were submitted, so that engines need not wait for more."""

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the answers and samples that have arrived from the engines.

        If there are none, wait for at most `timeout_s` seconds.
        """

    def finish(self, within_s: float) -> None:
        """Let the engines drop waiting requests, finish running ones within `within_s` seconds, and end."""


class Sink(Protocol):
    """The interface of an object that receives the answers of engines."""

    def register(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Register requests before they are submitted to the engines.

        Args:
            batch: The rows of the plan for these requests.
            requests: The requests, in the order of submission.
        """

    def take(self, done: WorkDone) -> None:
        """Receive the answers and samples of an engine."""

    def should_stop(self) -> bool:
        """Return True if the run should stop early, because the remaining requests cannot change the outcome."""

    def tick(self) -> None:
        """Do periodic work, such as committing answers, that is due. Called about ten times a second."""


Batches = Iterator[tuple[PlanBatch, list[Request]]]


class Plans(Protocol):
    """The interface of the plans of a run after its first plan."""

    @property
    def will_plan_again(self) -> bool:
        """Return True if another plan will certainly follow, whatever the next answers are."""

    def next(self, exhausted: bool, idle: bool) -> Batches | None:
        """Return batches of requests that replace the rest of the current plan, or None to keep the current plan.

        Args:
            exhausted: Whether all requests of the current plan were submitted.
            idle: Whether, in addition, all submitted requests are answered.
        """


class OnePlan:
    """Implements `Plans` for a run that has only its first plan."""

    will_plan_again = False

    def next(self, exhausted: bool, idle: bool) -> None:
        """Return None, because no other plan follows. The arguments are not used."""


def run_plan(
    batches: Batches,
    engines: Engines,
    sink: Sink,
    interrupts: Interrupts,
    draining: Callable[[float], None],
    plans: Plans | None = None,
) -> None:
    """Run the requests of a plan and of later plans on engines.

    Ends when all requests are answered, when `sink.should_stop()` returns True, or after a signal. In the last two
    cases, running requests have DRAIN_S (15) seconds to finish, and waiting requests are dropped.

    Args:
        batches: Batches of the first plan's requests, in order.
        engines: The engines.
        sink: Receives the answers.
        interrupts: The signals of the run.
        draining: Called after a signal with the number of seconds that running requests have to finish.
        plans: The plans after the first one. None: there are none.

    Raises the error that ended the last engine.
    """
    in_flight, more, plans = 0, True, plans or OnePlan()
    while more or in_flight or plans.will_plan_again:
        if interrupts.pending is not None:
            # without `info` the engines are still loading, so no request can finish
            if in_flight and engines.info is not None:
                draining(DRAIN_S)
                _drain(engines, sink)
            return
        if sink.should_stop():
            break  # running requests are drained and stored for a later run
        while more and engines.wants_more:
            read = next(batches, None)
            if read is None:
                more = False
                engines.end_plan()
                break
            batch, requests = read
            sink.register(batch, requests)
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
    # Engines that do not end in time are ended by their owner
    engines.finish(DRAIN_S)
    give_up = time.monotonic() + DRAIN_S + LATE_S
    while not engines.left and time.monotonic() < give_up:
        for done in engines.receive(POLL_S):
            sink.take(done)
        sink.tick()
