"""The parent's end of a worker, the process of an engine."""

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
    Learn,
    Left,
    Load,
    Loaded,
    Placed,
    Pulse,
    Ready,
    WorkDone,
    WorkerSpec,
)
from batchinfer.pipeline.workers.transport import Link, Transport

CONTINUES = "the same command resumes the job"
LEAVE_S = 10.0  # a worker that was told to leave and has not by then is killed
_BY_CODE: dict[int, type[BatchInferError]] = {
    kind.exit_code: kind for kind in (Unavailable, OutOfMemory, SecurityRefusal, InputCorrupt)
}
# What ends one engine and need not end another: its device is not there or full, or it failed. A checkpoint that is
# refused is refused by all.
OF_ONE = (Unavailable.exit_code, OutOfMemory.exit_code, BatchInferError.exit_code)
# A worker that was ready and then failed with one of these may do better anew; what it refuses it refuses again.
_AT_WORK = (BatchInferError.exit_code, OutOfMemory.exit_code)


@dataclass(frozen=True, slots=True)
class Crash:
    """An end of the worker that need not happen again: it was killed, or failed at work. `silent`: it was killed by
    this process, because it had said nothing for too long."""

    kind: type[BatchInferError]
    what: str
    advice: str
    detail: str = ""  # a traceback
    silent: bool = False

    def error(self, *more: str) -> BatchInferError:
        """Return the error for a user; `more` stands between what happened and what helps."""
        return self.kind(
            "; ".join([self.what, *more, self.advice]) + (f"\n{self.detail}" if self.detail else "")
        )


class WorkerHandle:
    """The handle starts the worker, feeds it, hears from it, and outlives it. The worker makes its engine in two steps:
    `load`, for which no plan is needed, and `configure`. Leaving it as a context manager ends the worker."""

    def __init__(
        self, spec: WorkerSpec, transport: Transport, link: Link | None = None, began: float | None = None
    ) -> None:
        """link: the way to a worker that was started at the moment `began`; None: one is started."""
        self.spec = spec
        self._loads = self._loaded = self._configured = False
        # what it began to do, and when
        self._moments: list[tuple[str | None, float]] = [("starting", began or time.perf_counter())]
        self.link: Link = link or transport.start(spec)
        self.left = False  # whether the worker has said all it had to say
        self._failed: Failed | None = None  # raised once all that was finished before it was received
        self.peak_rss: int | None = None  # bytes; known once the worker has left
        # CPU cores that others used meanwhile, this process included; known then, too
        self.other_cores: float | None = None
        self.expert_tokens: ExpertTokens = {}  # known then, too
        self.ranks: tuple[RankUse, ...] = ()  # likewise; none where it is one alone
        self.placement: Placed | None = None  # of a worker that runs on a cluster
        self.info: EngineInfo | None = None  # known once it is ready
        # Whether it waits for an answer to its question what the engines of a run choose, and whether it was told to
        # choose, and has not said yet what; and what it chose
        self.asks = self.decides = self._tried = False
        self.chosen: str | None = None
        self.untimed = False  # what it does until its next message takes as long as it takes
        self.beats = False  # whether it says now and then that it loads
        self.waits_for = ""  # a rank of it that says nothing while it loads
        self._silent_s: float | None = None  # for so long, when it was given up
        self.crash: Crash | None = None  # what `receive` raised, if it is one
        self.traceback = ""  # of the error that ended it, if it could report one

    def __enter__(self) -> WorkerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self) -> None:
        """Tell the worker to load its weights, if it was not told before. Should it be gone, the next `receive`
        tells."""
        if not self._loads:
            self._loads = True
            self._begins("loading")
            self.link.send(Load())

    @property
    def placed(self) -> bool:
        """Whether the worker runs. A cluster may let it wait for resources."""
        return self.link.placed

    @property
    def loaded(self) -> bool:
        """Whether its weights are loaded."""
        return self._loaded

    def configure(self, config: EngineConfig) -> None:
        """Tell the worker what to make of its weights."""
        self.load()
        self._configured = True
        if self._loaded:
            self._begins("getting ready")
        self.link.send(Configure(config))

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to the worker. Should it be gone, the next `receive` tells."""
        self.link.send(Add(requests))

    def learn(self, answers: Sequence[TokenIds]) -> None:
        """Tell the worker of answers that others finished. Should it be gone, the next `receive` tells."""
        self.link.send(Learn.of(answers))

    def finish(self, within_s: float) -> None:
        """Tell the worker to drop what waits, finish what runs within `within_s` seconds, and leave."""
        self.link.send(Finish(within_s))

    def answer(self, chosen: str | None) -> None:
        """Tell the worker what was chosen; None: it is to choose."""
        self.asks, self.decides = False, chosen is None
        self._tried |= self.decides
        self.link.send(Answer(chosen))

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Return the work that has come, waiting for at most `timeout_s` when there is nothing.

        Raises the error that ended the worker, once everything that it had finished was received.
        """
        heard: list[WorkDone] = []
        while not self.ended and self.link.poll(0 if heard else timeout_s):
            try:
                message = self.link.receive()
            except EOFError:
                if heard:
                    return heard  # the next call finds the end again
                self._raise_death()
            if not isinstance(message, WorkDone):
                self._note(message)
                break
            self.untimed = False
            heard.append(message)
        if self._failed is not None and not heard:
            self._raise_death()
        return heard

    def _begins(self, activity: str | None, at: float | None = None) -> None:
        """Note what the worker does from now on, or has done since a moment; None: nothing any more."""
        now = time.perf_counter()
        self._moments.append((activity, now if at is None else min(now, max(at, self._moments[-1][1]))))

    @property
    def activities(self) -> Iterator[tuple[str, float, float]]:
        """Yield what the worker did so far, and the moments of `time.perf_counter` between which it did."""
        ends = [moment for _, moment in self._moments[1:]] + [time.perf_counter()]
        for (activity, began), ended in zip(self._moments, ends, strict=True):
            if activity is not None:
                yield activity, began, ended

    @property
    def ended(self) -> bool:
        """Whether nothing more is read from its link; `receive` still raises what ended it."""
        return self.left or self._failed is not None

    def give_up(self, silent_s: float) -> None:
        """End a worker that has said nothing for `silent_s` seconds; the next `receive` tells."""
        self._silent_s = silent_s
        self.link.kill()

    def close(self) -> None:
        """End the worker, gently when it has left already."""
        if self._moments[-1][0] is not None:
            self._begins(None)
        if self.left:
            self.link.wait(LEAVE_S)
        self.link.close()

    def _note(self, message: object) -> None:
        if isinstance(message, Placed):
            self.placement = message
        elif isinstance(message, Loaded):
            self._loaded = True
            self._begins("getting ready" if self._configured else "waiting for the plan", message.at)
        elif isinstance(message, Ready):
            self.info, self.untimed, self.waits_for = message.info, False, ""
            self._begins("computing")
        elif isinstance(message, Ask):
            self.asks = True
        elif isinstance(message, Chosen):
            self.decides, self.chosen = False, message.chosen
        elif isinstance(message, Pulse):
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
        failed = self._last_words()
        self.traceback = "" if failed is None else failed.detail
        if failed is None:
            self.crash = self._crash()
        elif failed.died or (self._may_do_better and failed.exit_code in _AT_WORK):
            self.crash = _crash_of(failed)
        if self.crash is not None:
            raise self.crash.error()
        assert failed is not None
        raise error_of(failed, str(self.spec.load.model))

    @property
    def _may_do_better(self) -> bool:
        """Whether another worker in its place may not fail: it was ready, or compared kernels, as no other will."""
        return self.info is not None or self._tried

    def _crash(self) -> Crash:
        """Return how a worker ended that could not say why."""
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

    def _last_words(self) -> Failed | None:
        """Return the message in which the worker said why it died, if it could."""
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
    """Return the error that a process reports, of the class of its exit code."""
    if failed.exit_code == JobFileError.exit_code:
        return JobFileError(model, _mistakes(failed.message))
    kind = _BY_CODE.get(failed.exit_code)
    if kind is not None:
        return kind(failed.message)
    return BatchInferError(f"the engine failed: {failed.message}\n{failed.detail}")


def _crash_of(failed: Failed) -> Crash:
    """Return the crash of a worker that told of it; an error that is not of our own tree comes with its traceback."""
    kind = _BY_CODE.get(failed.exit_code)
    if kind is not None:
        return Crash(kind, failed.message, CONTINUES)
    return Crash(BatchInferError, f"the engine failed: {failed.message}", CONTINUES, failed.detail)


def _mistakes(text: str) -> list[Mistake]:
    return [Mistake("model", line.strip()) for line in text.splitlines()[1:]] or [Mistake("model", text)]
