"""The driver's handle of a worker: starts it, exchanges messages with it, and ends it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from batchinfer.core.errors import (
    BatchInferError,
    InputCorrupt,
    JobFileError,
    Mistake,
    OutOfMemory,
    SecurityRefusal,
    Unavailable,
)
from batchinfer.core.request import Request, TokenIds
from batchinfer.core.samples import ExpertTokens, RankUse
from batchinfer.engine.config import EngineConfig, EngineInfo
from batchinfer.pipeline.workers.messages import (
    Add,
    Answer,
    Ask,
    Chosen,
    Configure,
    Failed,
    Finish,
    HeartbeatMessage,
    Learn,
    Left,
    Load,
    Loaded,
    Placed,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.transport import Link, Transport

CONTINUES = "the same command resumes the job"
LEAVE_S = 10.0  # seconds after which a worker that should leave is killed
_BY_CODE: dict[int, type[BatchInferError]] = {
    kind.exit_code: kind for kind in (Unavailable, OutOfMemory, SecurityRefusal, InputCorrupt)
}
# Exit codes of errors that may affect only one engine: its device is missing or full, or it failed. Other errors, such
# as a refused checkpoint, affect all engines.
SINGLE_ENGINE_CODES = (Unavailable.exit_code, OutOfMemory.exit_code, BatchInferError.exit_code)
# Exit codes after which a worker that was ready is restarted
_RESTART_CODES = (BatchInferError.exit_code, OutOfMemory.exit_code)


@dataclass(frozen=True, slots=True)
class Crash:
    """A death of a worker after which another worker may succeed: it was killed, or failed while it ran requests.

    Attributes:
        kind: Class of the error to raise.
        what: What happened, for the user.
        advice: The advice to the user.
        detail: The traceback, or "".
        silent: Whether the watchdog killed the worker.
    """

    kind: type[BatchInferError]
    what: str
    advice: str
    detail: str = ""
    silent: bool = False

    def error(self, *more: str) -> BatchInferError:
        """Return the error to raise for the crash.

        Args:
            more: Further texts for the message. They come before the advice.
        """
        return self.kind(
            "; ".join([self.what, *more, self.advice]) + (f"\n{self.detail}" if self.detail else "")
        )


class WorkerHandle:
    """The driver's handle of a worker. A context manager, which ends the worker.

    `load` lets the worker load its weights. `configure` also lets it build the engine, and needs the plan of the run.
    After the death of the worker, methods that send a message do nothing, and the next `receive` raises.
    """

    def __init__(
        self, spec: WorkerSpec, transport: Transport, link: Link | None = None, began: float | None = None
    ) -> None:
        """Start a worker, or use the running worker of `link`.

        Args:
            spec: Specification of the worker.
            transport: Starts the worker.
            link: The connection to a worker that is already running, or None.
            began: When that worker was started, a time of `time.perf_counter`.
        """
        self.spec = spec
        self._loads = self.loaded = self._configured = False
        # Activities and their start times
        self._moments: list[tuple[str | None, float]] = [("starting", began or time.perf_counter())]
        self.link: Link = link or transport.start(spec)
        self.left = False  # whether the worker has sent its last message
        self._failed: Failed | None = None  # raised once all earlier results were received
        # The next four are known once the worker has left
        self.peak_rss: int | None = None  # bytes
        self.other_cores: float | None = None  # CPU cores that other processes used, this process included
        self.expert_tokens: ExpertTokens = {}
        self.ranks: tuple[RankUse, ...] = ()  # empty for an engine with one rank
        self.placement: Placed | None = None  # of a worker on a cluster
        self.info: EngineInfo | None = None  # known once the engine is ready
        self.asks = False  # whether it waits for the choice of kernels that all engines share
        self.decides = False  # whether it is making that choice
        self._tried = False  # whether it has ever been asked to make it
        self.chosen: str | None = None  # the choice that it made
        self.untimed = False  # whether the watchdog waits without limit for the next message
        self.beats = False  # whether it has sent a heartbeat
        self.waits_for = ""  # the name of a silent rank for which the engine waits
        self._silent_s: float | None = None  # the limit of the watchdog that ended it
        self.crash: Crash | None = None  # the crash that `receive` has raised
        self.traceback = ""  # of the error that the worker reported

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self) -> None:
        """Tell the worker to load its weights. A second call does nothing."""
        if not self._loads:
            self._loads = True
            self._begins("loading")
            self.link.send(Load())

    @property
    def placed(self) -> bool:
        """Return True if the worker runs, and False while it waits for resources of a cluster."""
        return self.link.placed

    def configure(self, config: EngineConfig) -> None:
        """Tell the worker to load its weights, unless `load` was called, and to build its engine.

        Args:
            config: The configuration of the engine.
        """
        self.load()
        self._configured = True
        if self.loaded:
            self._begins("getting ready")
        self.link.send(Configure(config))

    def submit(self, requests: Sequence[Request]) -> None:
        """Send requests to the worker, which queues them."""
        self.link.send(Add(requests))

    def learn(self, answers: Sequence[TokenIds]) -> None:
        """Send the worker answers of other workers, which its engine may use as a source of draft tokens.

        Args:
            answers: Tokens of each answer.
        """
        self.link.send(Learn.of(answers))

    def finish(self, within_s: float) -> None:
        """Tell the worker to drop waiting requests, finish running ones within `within_s` seconds, and end."""
        self.link.send(Finish(within_s))

    def answer(self, chosen: str | None) -> None:
        """Send the worker the choice of kernels that all engines of the run share.

        Args:
            chosen: The choice. None: this worker must make it.
        """
        self.asks, self.decides = False, chosen is None
        self._tried |= self.decides
        self.link.send(Answer(chosen))

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the answers and samples that have arrived from the worker.

        If there are none, wait for at most `timeout_s` seconds. Once all results of a worker that died were returned,
        the next call raises the error that ended the worker.
        """
        results: list[WorkDone] = []
        while not self.ended and self.link.poll(0 if results else timeout_s):
            try:
                message = self.link.receive()
            except EOFError:
                if results:
                    return results  # the next call raises the error
                self._raise_death()
            if not isinstance(message, WorkDone):
                self._note(message)
                break
            self.untimed = False
            results.append(message)
        if self._failed is not None and not results:
            self._raise_death()
        return results

    def _begins(self, activity: str | None, at: float | None = None) -> None:
        # `activity` is None if the worker has ended; `at` is a time of `time.perf_counter`
        now = time.perf_counter()
        self._moments.append((activity, now if at is None else min(now, max(at, self._moments[-1][1]))))

    @property
    def activities(self) -> Iterator[tuple[str, float, float]]:
        """Yield each activity of the worker so far: its name, start and end, as times of `time.perf_counter`."""
        ends = [moment for _, moment in self._moments[1:]] + [time.perf_counter()]
        for (activity, began), ended in zip(self._moments, ends, strict=True):
            if activity is not None:
                yield activity, began, ended

    @property
    def ended(self) -> bool:
        """Return True if the worker has sent its last message.

        If this message is an error, `receive` may not have raised it yet.
        """
        return self.left or self._failed is not None

    def give_up(self, silent_s: float) -> None:
        """Kill the worker, because it has sent no message for too long. The next `receive` raises.

        Args:
            silent_s: The limit in seconds that the worker exceeded.
        """
        self._silent_s = silent_s
        self.link.kill()

    def close(self) -> None:
        """End the worker. If it has sent its last message, wait at most 10 seconds until it ends on its own."""
        if self._moments[-1][0] is not None:
            self._begins(None)
        if self.left:
            self.link.wait(LEAVE_S)
        self.link.close()

    def _note(self, message: object) -> None:
        if isinstance(message, Placed):
            self.placement = message
        elif isinstance(message, Loaded):
            self.loaded = True
            self._begins("getting ready" if self._configured else "waiting for the plan", message.at)
        elif isinstance(message, Ready):
            self.info, self.untimed, self.waits_for = message.info, False, ""
            self._begins("computing")
        elif isinstance(message, Ask):
            self.asks = True
        elif isinstance(message, Chosen):
            self.decides, self.chosen = False, message.chosen
        elif isinstance(message, HeartbeatMessage):
            self.beats, self.untimed, self.waits_for = True, message.untimed, message.waits_for
        elif isinstance(message, Left):
            self.left, self.peak_rss = True, message.peak_rss
            self._begins(None)
            self.other_cores, self.expert_tokens = message.other_cores, message.expert_tokens
            self.ranks = message.ranks
        elif isinstance(message, Failed):
            self._failed = message
        else:
            raise BatchInferError(
                f"the engine's process sent {type(message).__name__}, which is not expected"
            )

    def _raise_death(self) -> NoReturn:
        failed = self._final_failure()
        self.traceback = "" if failed is None else failed.detail
        if failed is None:
            self.crash = self._crash()
        elif failed.died or (self._may_do_better and failed.exit_code in _RESTART_CODES):
            self.crash = _crash_of(failed)
        if self.crash is not None:
            raise self.crash.error()
        assert failed is not None
        raise error_of(failed, str(self.spec.load.model))

    @property
    def _may_do_better(self) -> bool:
        # True if the worker was ready, or died while it compared kernels, which other workers will not
        # compare
        return self.info is not None or self._tried

    def _crash(self) -> Crash:
        if self._silent_s is not None:
            who = self.waits_for or "it"
            what = (
                f"the engine's process was ended, because {who} made no progress for {self._silent_s:.0f} s"
            )
            return Crash(Unavailable, what, CONTINUES, silent=True)
        ended = self.link.wait(LEAVE_S)
        what = f"the engine's process {'closed its connection' if ended is None else ended}"
        if ended is not None and ended.out_of_memory:
            return Crash(OutOfMemory, what, f"lower engine.kv_memory or engine.max_num_seqs; {CONTINUES}")
        if ended is not None and ended.out_of_cpu_time:
            return Crash(Unavailable, what, f"raise it; {CONTINUES}")
        return Crash(Unavailable, what, CONTINUES)

    def _final_failure(self) -> Failed | None:
        if self._failed is not None:
            return self._failed
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self.link.poll(0.1):
            try:
                message = self.link.receive()
            except EOFError:
                return None
            if isinstance(message, Failed):
                return message
        return None


def error_of(failed: Failed, model: str) -> BatchInferError:
    """Return the error to raise for a Failed message. Its class has the exit code of the message.

    Args:
        failed: The message.
        model: Path of the model, for errors about its files.
    """
    if failed.exit_code == JobFileError.exit_code:
        return JobFileError(model, _mistakes(failed.message))
    kind = _BY_CODE.get(failed.exit_code)
    if kind is not None:
        return kind(failed.message)
    return BatchInferError(f"the engine failed: {failed.message}\n{failed.detail}")


def _crash_of(failed: Failed) -> Crash:
    kind = _BY_CODE.get(failed.exit_code)
    if kind is not None:
        return Crash(kind, failed.message, CONTINUES)
    return Crash(BatchInferError, f"the engine failed: {failed.message}", CONTINUES, failed.detail)


def _mistakes(text: str) -> list[Mistake]:
    return [Mistake("model", line.strip()) for line in text.splitlines()[1:]] or [Mistake("model", text)]
