"""The forecast of how long devices will have nothing to run, by what they wait for."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.job import Job
from batchinfer.report.tables.earlier_runs import earlier_idle
from batchinfer.report.tables.folder import report_folder


@dataclass(frozen=True, slots=True)
class IdleForecast:
    """Seconds in which a run's devices wait. None: no earlier run of the job tells."""

    input_s: float  # as long as it took to read the input just now
    plan_s: float  # likewise to plan it
    load_s: float | None  # as in `runs` earlier runs, the median
    tail_s: float | None  # likewise, for other replicas' last rows
    publish_s: float | None  # likewise, for as many rows as there are now
    runs: int

    @property
    def total_s(self) -> float:
        """The sum of what is known."""
        known = (self.load_s, self.tail_s, self.publish_s)
        return self.input_s + self.plan_s + sum(seconds for seconds in known if seconds is not None)


def idle_forecast(job: Job, rows: int, input_s: float, plan_s: float) -> IdleForecast:
    """Forecast the idle time of a job of so many rows."""
    runs = earlier_idle(report_folder(job.results_root))
    if runs is None:
        return IdleForecast(input_s, plan_s, None, None, None, 0)
    a_row = runs.per_row("idle_publish_s")
    return IdleForecast(
        input_s, plan_s, runs.median("idle_load_s"), runs.median("idle_tail_s"), a_row * rows, runs.runs
    )
