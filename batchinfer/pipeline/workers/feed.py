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


def run_plan(
    batches: Batches,
    engines: Engines,
    sink: Sink,
    interrupts: Interrupts,
    draining: Callable[[float], None],
    further: Callable[[bool], Batches | None] = lambda _: None,
) -> None:
    """Feed a plan's batches (`planned_requests`) in order until all is answered, `sink` has enough, or a signal comes.

    Once all are handed out, `further` is asked for those that follow from the answers; the last time when it is told
    that nothing is in flight.

    After a signal what runs may finish for DRAIN_S seconds; `draining` hears of it. Raises what ended the engine.
    """
    in_flight, more = 0, True
    while more or in_flight:
        if interrupts.pending is not None:
            # Without an engine nothing runs: a model may be loading, again perhaps
            if in_flight and engines.info is not None:
                draining(DRAIN_S)
                _drain(engines, sink)
            return
        if sink.enough():
            return
        while more and engines.wants_more:
            read = next(batches, None)
            if read is None:
                more = False
                break
            batch, requests = read
            sink.planned(batch, requests)
            engines.submit(requests)
            in_flight += len(requests)
        for done in engines.receive(POLL_S):
            in_flight -= len(done.completions)
            sink.take(done)
        sink.tick()
        if not more and (following := further(in_flight == 0)) is not None:
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
