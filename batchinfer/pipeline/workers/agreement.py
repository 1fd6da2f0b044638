"""Makes all engines of a run use the same choice of kernels, although timings differ between processes."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.config import NO_CHOICE
from batchinfer.pipeline.workers.worker_handle import WorkerHandle


class Agreement:
    """Makes all engines of a run use the same choice of kernels.

    The first engine that asks times the kernels and chooses. All other engines get its choice, also engines that start
    later. If the choosing engine dies first, all engines use NO_CHOICE, because a kernel that it tried may have killed
    it.
    """

    def __init__(self) -> None:
        self.chosen: str | None = None
        self._chooser: WorkerHandle | None = None  # the worker that chooses

    def answer_waiting(self, engines: Iterable[WorkerHandle]) -> None:
        """Send the choice of kernels to the workers that wait for it. Call it regularly.

        If no choice was made yet, the first worker that waits is asked to make it.

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
