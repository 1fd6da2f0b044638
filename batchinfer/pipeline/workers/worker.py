"""The engine's process: reads requests, steps, sends back what came of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineInfo
from batchinfer.machine.garbage import loaded_for_good
from batchinfer.machine.memory import peak_memory
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.endings import Leave, failure, leave, settle
from batchinfer.pipeline.workers.loading import EngineLoading
from batchinfer.pipeline.workers.messages import (
    Add,
    Finish,
    Learn,
    Left,
    Pulse,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.ranks.meeting import Parent
from batchinfer.pipeline.workers.ranks.others import OtherRanks
from batchinfer.pipeline.workers.shared_cores import SharedCores
from batchinfer_kernels.cpu.spinning import Spinning

# A message costs ~50 us; steps of a small model take less than a millisecond. Sending at this pace keeps both small.
SEND_EVERY_S = 0.05
SEND_AT = 256  # completions
PULSE_S = 5.0  # while requests are taken in, whose constraints are compiled


def main(spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
    """Entry point of the spawned process."""
    run_engine(spec, Parent(connection), leave)
    leave(0)


def run_engine(spec: WorkerSpec, parent: Parent, leave: Leave) -> None:
    """Run an engine until the parent no longer needs it. Raises SystemExit after a failure, which the parent was sent.

    Args:
        spec: The engine.
        parent: The connection to the parent.
        leave: Ends the engine at once, from any thread.
    """
    try:
        settle(spec.place)
        _work(spec, parent, leave)
    except (BrokenPipeError, EOFError):
        return  # the parent is gone, or needs no engine
    except BaseException as error:  # noqa: BLE001 - the parent must hear of every error
        parent.send(failure(error))
        raise SystemExit(1) from None


def _work(spec: WorkerSpec, parent: Parent, leave: Leave) -> None:
    """Make the engine, with its other ranks, and work until the parent wants no more."""
    ranks = OtherRanks(spec, parent, leave)
    with ranks.blamed():
        built = EngineLoading(spec, parent, ranks).engine()
        worker = _Worker(built, parent, ranks)
        with loaded_for_good():
            worker.run()


def _shared_cores(info: EngineInfo) -> SharedCores | None:
    """Return what watches the cores; None where the engine's work is not done by them."""
    if info.device != "cpu":
        return None
    return SharedCores(info.threads, Spinning())


class _Worker:
    """A reader thread fills the inbox, so that a parent that sends never waits for a worker that sends."""

    def __init__(self, built: Any, parent: Parent, ranks: OtherRanks) -> None:
        """built: a BuiltEngine, or one of a test."""
        self._connection, self._ranks = parent, ranks
        self._engine, info, self._read_loads = built.engine, built.info, built.read_loads
        self._account = built.account
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done, self._sent_at = WorkDone(), time.monotonic()
        self._cores = _shared_cores(info)
        self._leave_at: float | None = None
        threading.Thread(target=self._read, daemon=True, name="inbox").start()
        parent.send(Ready(info))

    def run(self) -> None:
        """Work until told to finish, or until the parent is gone. When a step fails, what was finished before is
        sent."""
        try:
            self._work()
        finally:
            self._send(force=True)
        others = self._cores.other_cores if self._cores else None
        own = self._read_loads()
        self._ranks.finish()
        loads = {**self._ranks.expert_tokens, **own}
        uses = () if self._account is None else (self._account.use(), *self._ranks.uses)
        peak_rss = peak_memory() + sum(self._ranks.peaks)
        self._connection.send(Left(peak_rss, others, loads, tuple(sorted(uses, key=attrgetter("rank")))))

    def _work(self) -> None:
        while self._leave_at is None or (self._engine.unfinished and time.monotonic() < self._leave_at):
            self._take_messages()
            if self._engine.unfinished:
                self._collect(self._engine.step())
            self._send(force=not self._engine.unfinished)
            if self._cores is not None:
                self._cores.tick()

    def _read(self) -> None:
        while True:
            try:
                with receiving():
                    message = self._connection.recv()
            except EOFError:
                message = None  # the parent is gone
            self._inbox.put(message)
            if message is None:
                return

    def _take_messages(self) -> None:
        """Handle all messages that are there; waits for one when there is nothing else to do."""
        block = not self._engine.unfinished
        while block or not self._inbox.empty():
            self._handle(self._inbox.get())
            block = False

    def _handle(self, message: object) -> None:
        if isinstance(message, Add):
            self._add(message.requests)
        elif isinstance(message, Learn):
            self._engine.learn(message.answers)
        elif isinstance(message, Finish):
            self._engine.forget_waiting()
            self._leave_at = time.monotonic() + message.within_s
        else:
            raise EOFError("the parent closed the connection")

    def _add(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engine. Constraints are compiled as they come: the parent hears in between that this
        goes on."""
        if all(request.params.constraint is None for request in requests):
            self._engine.add(requests)
            return
        for request in requests:
            self._engine.add([request])
            if time.monotonic() - self._sent_at >= PULSE_S:
                self._connection.send(Pulse())
                self._sent_at = time.monotonic()

    def _collect(self, output: Any) -> None:
        self._done.completions += output.completions
        self._done.requests += output.requests
        self._done.steps += output.samples

    def _send(self, force: bool) -> None:
        done, now = self._done, time.monotonic()
        due = force or now - self._sent_at >= SEND_EVERY_S or len(done.completions) >= SEND_AT
        if due and (done.steps or done.completions):
            self._connection.send(done)
            self._done, self._sent_at = WorkDone(), now
