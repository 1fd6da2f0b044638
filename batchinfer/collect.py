"""Where the engine's answers go: the store, the meter and the progress display, and whether it is worth going on."""

from __future__ import annotations

from batchinfer.data.completion_store import CompletionStore
from batchinfer.error_budget import Budget
from batchinfer.launch.messages import Progress as EngineProgress
from batchinfer.plan.plan import Window
from batchinfer.report.meter import Meter
from batchinfer.report.progress import Progress
from batchinfer.request import Completion


class Collector:
    """The sink of `run_plan`."""

    def __init__(self, store: CompletionStore, meter: Meter, progress: Progress, budget: Budget) -> None:
        self._store, self._meter, self._progress, self._budget = store, meter, progress, budget
        self._in_flight: dict[bytes, tuple[int, int]] = {}  # key → expected tokens, rows served
        self._errors = budget.already

    def planned(self, window: Window) -> None:
        """These requests go to the engine now."""
        expected, users = window.numbers("expected_tokens").tolist(), window.numbers("users").tolist()
        self._in_flight.update(zip(window.keys, zip(expected, users, strict=True), strict=True))

    def take(self, progress: EngineProgress) -> None:
        """Store the answers, count the rest."""
        self._store.append(progress.completions)
        for step in progress.steps:
            self._meter.step(step)
            self._progress.step(step)
        for request in progress.requests:
            self._meter.request(request)
        for completion in progress.completions:
            self._count(completion)
        self._store.maybe_commit()

    def enough(self) -> bool:
        """No result can come of it any more, and none was asked for."""
        return not self._budget.publish and self._budget.exceeded(self._errors)

    def tick(self) -> None:
        """Time has passed."""
        self._store.maybe_commit()
        self._progress.tick()

    def _count(self, completion: Completion) -> None:
        expected, users = self._in_flight.pop(completion.key)
        if completion.error is not None:
            self._errors += users
        self._progress.finished(
            expected_tokens=expected, completion_tokens=len(completion.token_ids), rows=users
        )
