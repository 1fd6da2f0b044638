"""Forecasts how long devices are idle, by cause."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.job import Job
from batchinfer.report.tables.earlier_runs import earlier_idle
from batchinfer.report.tables.folder import report_folder


@dataclass(frozen=True, slots=True)
class IdleForecast:
    """Seconds in which a run's devices are idle. None if no earlier run of the job measured them."""

    input_s: float  # measured now, while reading the input
    plan_s: float  # measured now, while planning
    load_s: float | None  # median of `runs` earlier runs
    tail_s: float | None  # median: waiting for the last rows of other replicas
    publish_s: float | None  # from the earlier time per row
    runs: int

    @property
    def total_s(self) -> float:
        """Return the sum of the known times."""
        known = (self.load_s, self.tail_s, self.publish_s)
        return self.input_s + self.plan_s + sum(seconds for seconds in known if seconds is not None)


def idle_forecast(job: Job, rows: int, input_s: float, plan_s: float) -> IdleForecast:
    """Forecast the idle time of a job of `rows` rows."""
    runs = earlier_idle(report_folder(job.results_root))
    if runs is None:
        return IdleForecast(input_s, plan_s, None, None, None, 0)
    a_row = runs.per_row("idle_publish_s")
    return IdleForecast(
        input_s, plan_s, runs.median("idle_load_s"), runs.median("idle_tail_s"), a_row * rows, runs.runs
    )
