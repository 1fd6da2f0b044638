"""The engine's process: reads requests, steps, sends back what came of them."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from batchinfer.core.errors import BatchInferError, OutOfMemory
from batchinfer.core.request import Request
from batchinfer.engine.config import EngineInfo
from batchinfer.machine.garbage import loaded_for_good
from batchinfer.machine.memory import peak_memory
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.loading import EngineLoading
from batchinfer.pipeline.workers.messages import (
    Add,
    EnginePlace,
    Failed,
    Finish,
    Learn,
    Left,
    Pulse,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.shared_cores import SharedCores
from batchinfer_kernels.cpu.spinning import Spinning

# A message costs ~50 us; steps of a small model take less than a millisecond. Sending at this pace keeps both small.
SEND_EVERY_S = 0.05
SEND_AT = 256  # completions
PULSE_S = 5.0  # while requests are taken in, whose constraints are compiled


def main(spec: WorkerSpec, connection: Connection[Any, Any]) -> None:
    """Entry point of the spawned process."""
    try:
        settle(spec.place)
        built = EngineLoading(spec, connection).engine()
        worker = _Worker(built, connection)
        with loaded_for_good():
            worker.run()
        leave()
    except (BrokenPipeError, EOFError):
        return  # the parent is gone, or wants no engine: nobody is left to tell
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        connection.send(failure(error))
        raise SystemExit(1) from None


def leave() -> NoReturn:
    """End this process at once: the parent has heard everything. Torch and CUDA would take their time to tear down what
    the system takes back anyway."""
    os._exit(0)


def settle(place: EnginePlace) -> None:
    """Keep to the place, before anything is imported that starts threads or asks for GPUs. Raises OSError."""
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    if place.gpu is not None:
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # else its numbers are in CUDA's own order
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu


def failure(error: BaseException) -> Failed:
    """Return what the parent hears of the error that ends the engine."""
    detail = traceback.format_exc()
    if isinstance(error, BatchInferError):
        return Failed(error.exit_code, str(error), detail)
    if _is_out_of_memory(error):
        text = (
            f"out of memory in the engine: {error}; lower engine.kv_memory or engine.max_num_batched_tokens"
        )
        return Failed(OutOfMemory.exit_code, text, detail)
    return Failed(BatchInferError.exit_code, f"{type(error).__name__}: {error}", detail)


def _is_out_of_memory(error: BaseException) -> bool:
    named = type(error).__name__ == "OutOfMemoryError"
    return named or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _shared_cores(info: EngineInfo) -> SharedCores | None:
    """Return what watches the cores; None where the engine's work is not done by them."""
    if info.device != "cpu":
        return None
    return SharedCores(info.threads, Spinning())


class _Worker:
    """A reader thread fills the inbox, so that a parent that sends never waits for a worker that sends."""

    def __init__(self, built: Any, connection: Connection[Any, Any]) -> None:
        """built: a BuiltEngine, or one of a test."""
        self._connection = connection
        self._engine, info, self._read_loads = built.engine, built.info, built.read_loads
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done, self._sent_at = WorkDone(), time.monotonic()
        self._cores = _shared_cores(info)
        self._leave_at: float | None = None
        threading.Thread(target=self._read, daemon=True, name="inbox").start()
        connection.send(Ready(info))

    def run(self) -> None:
        """Work until told to finish, or until the parent is gone. When a step fails, what was finished before is
        sent."""
        try:
            self._work()
        finally:
            self._send(force=True)
        others = self._cores.other_cores if self._cores else None
        self._connection.send(Left(peak_memory(), others, self._read_loads()))

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
        if output.sample is not None:
            self._done.steps.append(output.sample)

    def _send(self, force: bool) -> None:
        done, now = self._done, time.monotonic()
        due = force or now - self._sent_at >= SEND_EVERY_S or len(done.completions) >= SEND_AT
        if due and (done.steps or done.completions):
            self._connection.send(done)
            self._done, self._sent_at = WorkDone(), now
