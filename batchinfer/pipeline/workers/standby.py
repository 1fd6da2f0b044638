"""An engine's process that is started before anybody knows what for: it imports what engines need."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from batchinfer.core.errors import BatchInferError
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.spawning import Child
from batchinfer.pipeline.workers.engine_entry import ENGINE, WORKER


class EngineStandby:
    """Torch's import takes longer than all that a command does before its first row: the command starts this first of
    all, and reads its job meanwhile. Leaving it as a context manager ends the process, unless it was taken.

    There is none where the command has but one core, which it would have to share.
    """

    def __init__(self, factory: str = ENGINE) -> None:
        """factory: the function "module:function" that loads the engine, see WorkerSpec."""
        self.factory, self.began = factory, time.perf_counter()
        self._child: Child | None = None
        module = factory.partition(":")[0]
        if usable_cpus() > 1:
            # where no process may be started, whoever needs one tries again, and tells
            with suppress(OSError, BatchInferError):
                self._child = Child.standing_by(WORKER, (module,))

    def __enter__(self) -> EngineStandby:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def taken(self) -> Child | None:
        """Return the process, which from now on belongs to who asked; None where there is none."""
        child, self._child = self._child, None
        return child

    def close(self) -> None:
        """End the process, unless it was taken; safe to call twice."""
        if self._child is not None:
            self._child.close()
            self._child = None
