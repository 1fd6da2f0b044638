"""The feeder of a plan keeps one engine or several busy, and hands on the answers that come back."""

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
DRAIN_S = 15.0  # after a signal: what runs may finish for so long
LATE_S = 3.0  # a worker in the middle of a long step hears of it only afterwards


class Engines(Protocol):
    """One engine or several, as the feeder of a plan sees them; ReplicaPool documents the methods."""

    @property
    def info(self) -> EngineInfo | None: ...
    @property
    def left(self) -> bool: ...
    @property
    def wants_more(self) -> bool: ...
    def submit(self, requests: Sequence[Request]) -> None: ...
    def exhausted(self) -> None: ...
    def receive(self, timeout_s: float) -> list[WorkDone]: ...
    def finish(self, within_s: float) -> None: ...


class Sink(Protocol):
    """Takes what the engine gives back."""

    def planned(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Hear that the requests of this batch are handed out next, in this order."""

    def take(self, done: WorkDone) -> None:
        """Take completions and samples that an engine gave back."""

    def enough(self) -> bool:
        """Whether to stop early, because the rest of the plan could not change the outcome."""

    def tick(self) -> None:
        """Do what is due, as time has passed."""


Batches = Iterator[tuple[PlanBatch, list[Request]]]


class Plans(Protocol):
    """The plans that follow the first one."""

    @property
    def to_come(self) -> bool:
        """Whether one may come, whatever becomes of what is in flight."""

    def next(self, exhausted: bool, idle: bool) -> Batches | None:
        """Return the batches that take the place of those of the present plan; None: they stay. `exhausted`: all of
        them were handed out; `idle`: and nothing is in flight."""


class OnePlan:
    """No plans follow the first one."""

    to_come = False

    def next(self, exhausted: bool, idle: bool) -> None:
        """Keep to the present plan."""


def run_plan(
    batches: Batches,
    engines: Engines,
    sink: Sink,
    interrupts: Interrupts,
    draining: Callable[[float], None],
    plans: Plans | None = None,
) -> None:
    """Feed a plan's batches (`read_requests`) in order until all is answered, `sink` has enough, or a signal comes;
    and those of the plans that follow it.

    After a signal, and when `sink` has enough, the rows in progress have DRAIN_S seconds to finish. `draining` is
    called after a signal. Raises what ended the engine.
    """
    in_flight, more, plans = 0, True, plans or OnePlan()
    while more or in_flight or plans.to_come:
        if interrupts.pending is not None:
            # Without an engine nothing runs: a model may be loading, again perhaps
            if in_flight and engines.info is not None:
                draining(DRAIN_S)
                _drain(engines, sink)
            return
        if sink.enough():
            break  # the rows in progress are drained and stored: no later run computes them again
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
    """Have the worker finish what runs and leave; whoever closes the engines ends one that did not."""
    engines.finish(DRAIN_S)
    give_up = time.monotonic() + DRAIN_S + LATE_S
    while not engines.left and time.monotonic() < give_up:
        for done in engines.receive(POLL_S):
            sink.take(done)
        sink.tick()
