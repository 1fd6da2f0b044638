"""One engine of a pool: its process, and what it was given and has not given back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from batchinfer.engine.config import EngineInfo
from batchinfer.launch.engine_host import EngineHost
from batchinfer.launch.messages import WorkDone, WorkerSpec
from batchinfer.plan.backlog import tokens_of
from batchinfer.request import Request


class Replica:
    """A place for an engine: should its process die, another one may be started in its place."""

    def __init__(self, number: int, spec: WorkerSpec) -> None:
        self.number, self._spec = number, spec
        self._engine = number  # how many were started in the run before the present process
        self.unfinished: dict[bytes, Request] = {}  # in the order in which they were submitted
        self.restarts = 0
        self.gone = False  # nothing more is to be heard or expected
        self.load = 0  # tokens of what is unfinished, prompts and answers as long as they may be
        self._running = self._waiting = 0  # rows, after its last step
        self.host = EngineHost(spec)

    @property
    def info(self) -> EngineInfo | None:
        """What the present process has built; None while it loads."""
        return self.host.info

    @property
    def loads_first(self) -> bool:
        """It has not come to work yet."""
        return self.info is None and not self.gone and not self.restarts

    @property
    def is_ready(self) -> bool:
        return self.info is not None and not self.gone

    @property
    def at_once(self) -> int:
        """Rows that it runs at once: as many as its limit, or as its cache has room for."""
        assert self.info is not None
        return self._running if self._waiting else self.info.max_num_seqs

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self.unfinished.update((request.key, request) for request in requests)
        self.load += sum(map(tokens_of, requests))
        self.host.submit(requests)

    def receive(self) -> list[WorkDone]:
        """What has come. Raises what ended the process."""
        heard = self.host.receive(0)
        for done in heard:
            done.engine, done.replica = self._engine, self.number
            for completion in done.completions:
                self.load -= tokens_of(self.unfinished.pop(completion.key))
            if done.steps:
                self._running, self._waiting = done.steps[-1].running, done.steps[-1].waiting
        return heard

    def in_work(self) -> list[bytes]:
        """Keys that it ran: it admits requests in order, so these are among the first that it has not given back."""
        return [] if self.info is None else list(islice(self.unfinished, self.info.max_num_seqs))

    def take_back(self) -> list[Request]:
        """All that it has not given back, which it will not be asked for any more."""
        requests, self.unfinished = list(self.unfinished.values()), {}
        self.load = self._running = self._waiting = 0
        return requests

    def restart(self, engine: int) -> None:
        """Start another process, the `engine`-th of the run."""
        self.restarts += 1
        self._engine = engine
        self.host.close()
        self.host = EngineHost(self._spec)

    def close(self) -> None:
        """End the process."""
        self.gone = True
        self.host.close()
