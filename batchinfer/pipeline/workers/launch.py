"""Starts workers before the plan is known, to import libraries and load weights while the input is read."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from batchinfer.core.errors import BatchInferError
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.standby import EngineStandby
from batchinfer.pipeline.workers.transport import ProcessLink, Transport
from batchinfer.pipeline.workers.worker_handle import SINGLE_ENGINE_CODES, WorkerHandle


class Launch:
    """Starts the workers of a run before the plan is known, and lets them load weights.

    A context manager. At the end of its block it ends all workers, even if a pool of engines uses them by then.
    """

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
        """Start a worker for each specification. Does nothing if workers were started before.

        The workers import libraries and wait for `load`.

        Args:
            specs: The specifications of the workers.

        Raises:
            OSError: A process cannot be started.
        """
        if not self._workers:
            for spec in specs:
                self._workers.append(self._from_standby(spec) or WorkerHandle(spec, self._transport))

    def _from_standby(self, spec: WorkerSpec) -> WorkerHandle | None:
        standby = self._standby
        if standby is None or spec.factory != standby.factory:
            return None
        if not self._transport.can_use_standby(spec):
            standby.close()
            return None
        child = standby.take()
        if child is None:
            return None
        child.begin(spec)
        return WorkerHandle(spec, self._transport, ProcessLink(child), standby.began)

    def load(self) -> None:
        """Let the started workers load their weights."""
        self._loads = True
        for worker in self._workers:
            worker.load()

    @property
    def loaded(self) -> bool:
        """Return True if workers were started and all of them have loaded their weights."""
        return bool(self._workers) and all(worker.loaded for worker in self._workers)

    def receive_messages(self) -> None:
        """Receive messages of the workers while they load. Call it regularly.

        Raises:
            BatchInferError: A worker cannot load, and no other engine could. If another one may succeed, nothing is
                raised.
        """
        if not self._loads:
            return
        living = {worker.link: worker for worker in self._workers if not worker.ended and not worker.crash}
        for link in self._transport.wait_for_messages([*living], 0) if living else ():
            try:
                living[link].receive(0)
            except BatchInferError as error:
                # Otherwise the pool of engines handles the end of the worker
                fails_all = len(self._workers) == 1 or error.exit_code not in SINGLE_ENGINE_CODES
                if living[link].crash is None and fails_all:
                    raise

    def workers_for(self, specs: Sequence[WorkerSpec]) -> list[WorkerHandle]:
        """Return the started workers if they have exactly these specifications. Otherwise end them, and return [].

        Args:
            specs: The specifications of the workers that the run needs.
        """
        if [worker.spec for worker in self._workers] != [*specs]:
            self.end()
        return [*self._workers]

    def end(self) -> None:
        """End the started workers and the standby process."""
        if self._standby is not None:
            self._standby.close()
        while self._workers:
            self._workers[-1].close()
            self._workers.pop()
