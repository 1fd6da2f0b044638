"""One choice for all engines of a run: what is timed in one process may come out otherwise in another."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.engine.config import NO_CHOICE
from batchinfer.pipeline.workers.worker_handle import WorkerHandle


class Agreement:
    """The first engine that asks chooses. The others get its choice, and so does each one that is started later. Should
    it die before it has chosen, nothing is chosen in this run: what it tried may be what it died of."""

    def __init__(self) -> None:
        self.chosen: str | None = None
        self._chooser: WorkerHandle | None = None  # who was told to choose

    def settle(self, engines: Iterable[WorkerHandle]) -> None:
        """Note what was chosen, and answer those that wait. `engines`: those that are alive."""
        engines = list(engines)
        if self.chosen is None and self._chooser is not None:
            self.chosen = self._chooser.chosen
            if self.chosen is None and not any(one is self._chooser for one in engines):
                self.chosen = NO_CHOICE
        for one in engines:
            if one.asks and (self.chosen is not None or self._chooser is None):
                self._chooser = self._chooser or one
                one.answer(self.chosen)
