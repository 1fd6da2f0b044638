"""The engines' processes between their start and the plan: what needs no plan is loaded while the input is read."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from batchinfer.core.errors import BatchInferError
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.standby import EngineStandby
from batchinfer.pipeline.workers.transport import ProcessLink, Transport
from batchinfer.pipeline.workers.worker_handle import OF_ONE, WorkerHandle


class Launch:
    """Starts workers, and has them load. Leaving it as a context manager ends them, also where a pool works with them
    by then. A single worker may be a process that stands by."""

    def __init__(self, transport: Transport, standby: EngineStandby | None = None) -> None:
        self._transport, self._standby = transport, standby
        self._workers: list[WorkerHandle] = []
        self._loads = False

    def __enter__(self) -> Launch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def open(self, specs: Sequence[WorkerSpec]) -> None:
        """Start a worker for each of these, if there are none yet: they import what they need, and wait. Raises
        OSError where none can be started."""
        if not self._workers:
            for spec in specs:
                self._workers.append(self._from_standby(spec) or WorkerHandle(spec, self._transport))

    def _from_standby(self, spec: WorkerSpec) -> WorkerHandle | None:
        """Return a worker that is the process which stands by, if there is one and the transport can use it."""
        standby = self._standby
        if standby is None or spec.factory != standby.factory:
            return None
        if not self._transport.takes_standby(spec):
            standby.close()
            return None
        child = standby.taken()
        if child is None:
            return None
        child.begin(spec)
        return WorkerHandle(spec, self._transport, ProcessLink(child), standby.began)

    def load(self) -> None:
        """Have the workers load their weights: there is something to compute."""
        self._loads = True
        for worker in self._workers:
            worker.load()

    @property
    def loaded(self) -> bool:
        """Whether there are workers, and all have loaded their weights: they wait to be told what they are to run."""
        return bool(self._workers) and all(worker.loaded for worker in self._workers)

    def look(self) -> None:
        """Hear what workers that load have to say. Raises the error of one that cannot load, if no other engine could.
        Whatever else has ended a worker is found again by the pool."""
        if not self._loads:
            return
        living = {worker.link: worker for worker in self._workers if not worker.ended and not worker.crash}
        for link in self._transport.speaking([*living], 0) if living else ():
            try:
                living[link].receive(0)
            except BatchInferError as error:
                if living[link].crash is None and (len(self._workers) == 1 or error.exit_code not in OF_ONE):
                    raise

    def started(self, specs: Sequence[WorkerSpec]) -> list[WorkerHandle]:
        """Return the workers, if they are those that are wanted now; others are ended."""
        if [worker.spec for worker in self._workers] != [*specs]:
            self.end()
        return [*self._workers]

    def end(self) -> None:
        """End the workers, which nobody needs, or needs no longer; also a process that stands by."""
        if self._standby is not None:
            self._standby.close()
        while self._workers:
            self._workers[-1].close()
            self._workers.pop()
