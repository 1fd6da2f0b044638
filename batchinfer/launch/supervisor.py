"""An engine that outlives its worker's first death: what was in work runs again in a new worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType

from batchinfer.engine.config import EngineInfo
from batchinfer.errors import BatchInferError
from batchinfer.launch.engine_host import Crash, EngineHost
from batchinfer.launch.interrupts import Interrupts
from batchinfer.launch.messages import WorkDone, WorkerSpec
from batchinfer.request import ExpertTokens, Request

RESTARTS = 1  # a second death is no accident


class Supervisor:
    """An EngineHost to whoever feeds it. A worker that was killed or failed at work is replaced, RESTARTS times.

    The new worker gets what the old one had not given back, in the same order, before anything else: no answer is lost,
    none is received twice. After a signal no worker is started. `name_rows` says in words which rows some keys stand
    for, `notice` tells a user of a restart, and the time inside `loading` is that of starting a worker.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        interrupts: Interrupts,
        name_rows: Callable[[Sequence[bytes]], str],
        notice: Callable[[str], None],
        loading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._spec, self._interrupts = spec, interrupts
        self._name_rows, self._notice, self._loading = name_rows, notice, loading
        self._unfinished: dict[bytes, Request] = {}  # in the order in which they were submitted
        self._in_work_before: list[bytes] = []  # when a worker died
        self._to_resubmit = self._finishing = self._all_done = False
        self.restarts = 0
        self._host = self._started()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._host.close()

    @property
    def info(self) -> EngineInfo | None:
        """What the present worker has built; None while it loads."""
        return self._host.info

    @property
    def peak_rss(self) -> int | None:
        """Bytes that the last worker held at most; known once it has left."""
        return self._host.peak_rss

    @property
    def other_cores(self) -> float | None:
        """CPU cores that other processes used meanwhile; known with `peak_rss`."""
        return self._host.other_cores

    @property
    def expert_tokens(self) -> ExpertTokens:
        """What the last worker's experts were given; known with `peak_rss`. The counts of those that died before
        are lost: to send them now and then, a step would have to wait for the device."""
        return self._host.expert_tokens

    @property
    def left(self) -> bool:
        """Nothing more is to be heard."""
        return self._all_done or self._host.left

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._unfinished.update((request.key, request) for request in requests)
        self._host.submit(requests)

    def finish(self, within_s: float) -> None:
        """See EngineHost."""
        self._finishing = True
        self._host.finish(within_s)

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """See EngineHost. Raises what ended the worker when it is not replaced."""
        try:
            heard = self._receive(timeout_s)
        except BatchInferError as error:
            if self._host.crash is None:
                raise
            self._after(self._host.crash, error)
            return []
        for done in heard:
            for completion in done.completions:
                del self._unfinished[completion.key]
        if self._to_resubmit and self.info is not None and not self._finishing:
            self._to_resubmit = False
            self._host.submit(list(self._unfinished.values()))
        return heard

    def _receive(self, timeout_s: float) -> list[WorkDone]:
        if self.info is not None:
            return self._host.receive(timeout_s)
        with self._loading():
            return self._host.receive(timeout_s)

    def _started(self) -> EngineHost:
        with self._loading():
            return EngineHost(self._spec)

    def _after(self, crash: Crash, error: BatchInferError) -> None:
        """Start another worker. Raises when there is to be none."""
        if self._finishing and not self._unfinished:
            self._all_done = True  # what it still had to say was of no use to anybody
            return
        in_work = self._in_work()
        named = self._named(in_work)
        if self.restarts == RESTARTS or self._interrupts.pending is not None:
            raise crash.error(named) from error
        self._notice(f"{crash.what}; {named}; a new one is started")
        self.restarts += 1
        self._in_work_before = in_work
        self._host.close()
        self._host, self._to_resubmit = self._started(), True

    def _in_work(self) -> list[bytes]:
        """Keys that the worker ran: it admits requests in order, so these are among the first it has not given back."""
        return [] if self.info is None else list(islice(self._unfinished, self.info.max_num_seqs))

    def _named(self, in_work: Sequence[bytes]) -> str:
        """What was in work, and what of it already when a worker died before."""
        again = "" if not self.restarts else " again, after a restart"
        if not in_work:
            return f"it was loading the model{again}" if self.info is None else f"no row was in work{again}"
        before = set(self._in_work_before)
        both = [key for key in in_work if key in before]
        if both:
            return f"in work both times it died: {self._name_rows(both)}"
        return f"in work{again}: {self._name_rows(in_work)}"
