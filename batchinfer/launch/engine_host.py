"""The parent's end of the engine's process."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from batchinfer.engine.config import EngineInfo
from batchinfer.errors import (
    BatchInferError,
    InputCorrupt,
    JobFileError,
    Mistake,
    OutOfMemory,
    SecurityRefusal,
    Unavailable,
)
from batchinfer.launch import worker
from batchinfer.launch.messages import Add, Failed, Finish, Left, Progress, Ready, WorkerSpec
from batchinfer.request import Request
from batchinfer.spawning import start_deaf

LEAVE_S = 10.0  # a worker that was told to leave and has not by then is killed
_BY_CODE: dict[int, type[BatchInferError]] = {
    kind.exit_code: kind for kind in (Unavailable, OutOfMemory, SecurityRefusal, InputCorrupt)
}


class EngineHost:
    """Starts the worker, feeds it, hears from it, and outlives it. A context manager: leaving it ends the worker."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=worker.main, args=(spec, child), name="batchinfer-engine", daemon=True
        )
        start_deaf(self._process)
        child.close()
        self._left = False
        self._failed: Failed | None = None  # raised once all that was finished before it was received
        self.peak_rss: int | None = None  # bytes; known once the worker has left
        self.other_cores: float | None = (
            None  # CPU cores that other processes used meanwhile; known then, too
        )
        self._ready_at = time.monotonic(), time.process_time()
        self.info: EngineInfo | None = None  # known once it is ready

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Should the worker be gone, the next `receive` tells."""
        self._send(Add(requests))

    def finish(self, within_s: float) -> None:
        """Tell the worker to drop what waits, finish what runs within `within_s` seconds, and leave."""
        self._send(Finish(within_s))

    def _send(self, message: Add | Finish) -> None:
        """Raises nothing when nobody reads it: what the worker said before it ended is still to be received."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    @property
    def left(self) -> bool:
        """The worker has said all it had to say."""
        return self._left

    def receive(self, timeout_s: float) -> list[Progress]:
        """What has come, waiting for at most `timeout_s` when there is nothing.

        Raises what ended the worker, once everything that it had finished was received.
        """
        heard: list[Progress] = []
        while not self._ended and self._connection.poll(0 if heard else timeout_s):
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionResetError):
                if heard:
                    return heard  # the next call finds the end again
                self._raise_death()
            if not isinstance(message, Progress):
                self._note(message)
                break
            heard.append(message)
        if self._failed is not None and not heard:
            self._raise_death()
        return heard

    @property
    def _ended(self) -> bool:
        return self._left or self._failed is not None

    def close(self) -> None:
        """End the worker, gently when it has left already or waits for work."""
        if self._process.is_alive() and not self._left:
            self._process.kill()
        self._process.join(LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        self._process.close()

    def _note(self, message: object) -> None:
        if isinstance(message, Ready):
            self.info = message.info
            self._ready_at = time.monotonic(), time.process_time()
        elif isinstance(message, Left):
            self._left, self.peak_rss = True, message.peak_rss
            self.other_cores = self._without_this_process(message.other_cores)
        elif isinstance(message, Failed):
            self._failed = message
        else:
            raise BatchInferError(f"the engine's process sent {type(message).__name__}, which nobody expects")

    def _without_this_process(self, other_cores: float | None) -> float | None:
        """For the worker this process is another one; for the user it is part of the run."""
        began, worked = self._ready_at
        elapsed = time.monotonic() - began
        if other_cores is None or elapsed <= 0:
            return other_cores
        return max(0.0, other_cores - (time.process_time() - worked) / elapsed)

    def _raise_death(self) -> NoReturn:
        pending = self._last_words()
        if pending is not None:
            raise _error_of(pending, str(self._spec.config.model))
        self._process.join(LEAVE_S)
        code = self._process.exitcode
        if code is not None and code == -signal.SIGKILL:
            raise OutOfMemory(
                "the engine's process was killed (signal 9), most likely by the kernel because memory ran out; "
                "lower engine.kv_memory or engine.max_num_seqs and run the same command again"
            )
        how = f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"
        raise Unavailable(
            f"the engine's process ended unexpectedly ({how}); the same command resumes the job"
        )

    def _last_words(self) -> Failed | None:
        """What the worker sent before it died, if it could still say why."""
        if self._failed is not None:
            return self._failed
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self._connection.poll(0.1):
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                return None
            if isinstance(message, Failed):
                return message
        return None


def _error_of(failed: Failed, model: str) -> BatchInferError:
    if failed.exit_code == JobFileError.exit_code:
        return JobFileError(model, _mistakes(failed.message))
    kind = _BY_CODE.get(failed.exit_code)
    if kind is not None:
        return kind(failed.message)
    return BatchInferError(f"the engine failed: {failed.message}\n{failed.detail}")


def _mistakes(text: str) -> list[Mistake]:
    return [Mistake("model", line.strip()) for line in text.splitlines()[1:]] or [Mistake("model", text)]
