"""One choice for all engines of a run: what is timed in one process may come out otherwise in another."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.pipeline.workers.worker_handle import WorkerHandle


class Agreement:
    """The first engine that asks chooses. The others get its choice, and so does each one that is started later. Should
    it die before it has chosen, the next one does."""

    def __init__(self) -> None:
        self.chosen: str | None = None

    def settle(self, engines: Iterable[WorkerHandle]) -> None:
        """Note what was chosen, and answer those that wait. `engines`: those that are alive."""
        engines = list(engines)
        if self.chosen is None:
            self.chosen = next((one.chosen for one in engines if one.chosen is not None), None)
        for one in engines:
            if one.asks and (self.chosen is not None or not any(other.decides for other in engines)):
                one.answer(self.chosen)
