"""Makes all engines of a run use the same choice of kernels, although timings differ between processes."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.config import NO_CHOICE
from batchinfer.pipeline.workers.worker_handle import WorkerHandle


class Agreement:
    """Makes the engines of a run share one choice of kernels.

    The first engine that asks makes the choice. It is sent to all others, also to engines that start later. If that
    engine dies before it has chosen, all engines use NO_CHOICE: a kernel that it tried may have killed it.
    """

    def __init__(self) -> None:
        self.chosen: str | None = None
        self._chooser: WorkerHandle | None = None  # the worker that chooses

    def answer_waiting(self, engines: Iterable[WorkerHandle]) -> None:
        """Store the choice if it was made, and send it to the workers that wait for it.

        Without a choice, the first worker that waits is asked to make one.

        Args:
            engines: The workers that are alive.
        """
        engines = list(engines)
        if self.chosen is None and self._chooser is not None:
            self.chosen = self._chooser.chosen
            if self.chosen is None and not any(one is self._chooser for one in engines):
                self.chosen = NO_CHOICE
        for one in engines:
            if one.asks and (self.chosen is not None or self._chooser is None):
                self._chooser = self._chooser or one
                one.answer(self.chosen)
