"""A second forecast, during the run: for jobs of which nobody knew before how long their answers become."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from batchinfer.core.wording import seconds
from batchinfer.report.progress import Progress

# Answers that ended by themselves, and the share of the run's tokens: before that the run has mostly read prompts
FEWEST_ANSWERS, LEAST_SHARE = 64, 0.05


class RevisedForecast:
    """Says once how long the engine will take, judged by the lengths of the first answers and the rate so far."""

    def __init__(
        self,
        wanted: bool,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """`wanted`: the forecast before the run counted every answer at its max_tokens, or there was none. `began`:
        when the engine's time began, by the clock; None: with the first look."""
        self._wanted, self._notice, self._clock = wanted, notice, clock
        self._began = began
        self.facts: dict[str, Any] = {}  # for the run's report, by the names of the run table's columns

    def look(self, progress: Progress) -> None:
        """Say it as soon as enough answers are there."""
        output = progress.output
        if not self._wanted or output is None:
            return
        began = self._began = self._clock() if self._began is None else self._began
        if output.ended < FEWEST_ANSWERS:
            return
        share, left_s = progress.share, progress.left_s()
        if share is None or left_s is None or share < LEAST_SHARE:
            return
        self._wanted, whole_s = False, self._clock() - began + left_s
        self.facts = {"forecast_revised_s": whole_s}
        tokens = f", for about {output.total:,} output tokens" if output.total else ""
        self._notice(
            f"forecast from the first {output.ended:,} answers: the engine will take about {seconds(whole_s)} in all"
            f"{tokens}"
        )
