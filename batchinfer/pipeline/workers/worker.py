"""The main loop of a worker: receives requests, runs steps of the engine and sends the results."""

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
from batchinfer.machine.garbage import freeze_existing_objects
from batchinfer.machine.memory import peak_memory
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.endings import Leave, failure, leave, restrict_process
from batchinfer.pipeline.workers.loading import EngineLoading
from batchinfer.pipeline.workers.messages import (
    Add,
    Finish,
    HeartbeatMessage,
    Learn,
    Left,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.ranks.others import OtherRanks
from batchinfer.pipeline.workers.ranks.rendezvous import ParentConnection
from batchinfer.pipeline.workers.shared_cores import SharedCores
from batchinfer_kernels.cpu.spinning import SpinControl

# Results are sent at most this often. A message costs about 50 us, while a step of a small model takes less than 1 ms.
SEND_EVERY_S = 0.05
SEND_AT = 256  # completions that are sent without waiting
PULSE_S = 5.0  # interval of heartbeats while constraints of new requests are compiled


def main(spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
    """Run a worker, as the entry point of its process.

    Args:
        spec: Specification of the worker.
        connection: The connection to the driver.
    """
    run_engine(spec, ParentConnection(connection), leave)
    leave(0)


def run_engine(spec: WorkerSpec, parent: ParentConnection, leave: Leave) -> None:
    """Load an engine, and run it until the driver no longer needs it or is gone.

    Args:
        spec: Specification of the worker.
        parent: The connection to the driver.
        leave: Ends the engine immediately. Must be callable from any thread.

    Raises:
        SystemExit: The engine failed. The error was sent to the driver before.
    """
    try:
        restrict_process(spec.resources)
        _work(spec, parent, leave)
    except (BrokenPipeError, EOFError):
        return  # the driver is gone, or needs no engine
    except BaseException as error:  # noqa: BLE001 - the driver reports every error
        parent.send(failure(error))
        raise SystemExit(1) from None


def _work(spec: WorkerSpec, parent: ParentConnection, leave: Leave) -> None:
    ranks = OtherRanks(spec, parent, leave)
    with ranks.waiting_for_cause():
        built = EngineLoading(spec, parent, ranks).engine()
        worker = _Worker(built, parent, ranks)
        with freeze_existing_objects():
            worker.run()


def _shared_cores(info: EngineInfo) -> SharedCores | None:
    if info.device != "cpu":
        return None
    return SharedCores(info.threads, SpinControl())


class _Worker:
    """Runs an engine. A thread reads messages, so the worker and the driver never both block on sending."""

    def __init__(self, built: Any, parent: ParentConnection, ranks: OtherRanks) -> None:
        """Prepare to run a built engine, and send Ready to the driver.

        Args:
            built: A BuiltEngine, or a test's replacement for it.
            parent: The connection to the driver.
            ranks: The other ranks of the engine.
        """
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
        """Run the engine until a Finish message arrives or the driver is gone.

        Finished results are sent also if the engine raises an error.
        """
        try:
            self._work()
        finally:
            self._send(force=True)
        others = self._cores.other_cores if self._cores else None
        own = self._read_loads()
        self._ranks.finish()
        loads = {**self._ranks.expert_tokens, **own}
        use = None if self._account is None else self._account.use()
        uses = () if use is None else (use, *self._ranks.uses)
        own_peak = peak_memory() if use is None else use.peak_rss_bytes
        peak_rss = own_peak + sum(self._ranks.peaks)
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
                message = None  # the driver is gone
            self._inbox.put(message)
            if message is None:
                return

    def _take_messages(self) -> None:
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
            raise EOFError("the driver closed the connection")

    def _add(self, requests: Sequence[Request]) -> None:
        if all(request.params.constraint is None for request in requests):
            self._engine.add(requests)
            return
        for request in requests:
            self._engine.add([request])
            if time.monotonic() - self._sent_at >= PULSE_S:
                self._connection.send(HeartbeatMessage())
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
