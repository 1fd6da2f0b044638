"""The standby process, which imports the libraries of an engine while the command reads its job."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from batchinfer.core.errors import BatchInferError
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.spawning import Child
from batchinfer.pipeline.workers.engine_entry import ENGINE, WORKER


class EngineStandby:
    """A standby process, which imports the libraries of an engine before the job is known.

    A context manager, which ends the process at the end of its block unless `take` was called. With a single usable
    core, no process is started.
    """

    def __init__(self, factory: str = ENGINE) -> None:
        """Start the standby process. If this fails, there is no standby process, and no error is raised.

        Args:
            factory: "module:function" of the function that loads the engine, see WorkerSpec.
        """
        self.factory, self.began = factory, time.perf_counter()
        self._child: Child | None = None
        module = factory.partition(":")[0]
        if usable_cpus() > 1:
            # on failure, the launch of the worker tries again and reports the error
            with suppress(OSError, BatchInferError):
                self._child = Child.standing_by(WORKER, (module,))

    def __enter__(self) -> EngineStandby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> Child | None:
        """Return the standby process, or None if there is none. From now on, the caller must end it."""
        child, self._child = self._child, None
        return child

    def close(self) -> None:
        """End the standby process unless `take` was called. May be called twice."""
        if self._child is not None:
            self._child.close()
            self._child = None
