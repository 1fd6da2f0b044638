"""Forecasts how long devices are idle, by cause."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.job import Job
from batchinfer.report.tables.earlier_runs import earlier_idle
from batchinfer.report.tables.folder import report_folder


@dataclass(frozen=True, slots=True)
class IdleForecast:
    """Forecast seconds of a run in which its devices are idle, by cause. A value is None if no earlier run measured it.

    Attributes:
        input_s: Reading the input. Measured now.
        plan_s: Planning. Measured now.
        load_s: Loading the model. Median of earlier runs.
        tail_s: Waiting until other replicas have finished their last rows. Median of earlier runs.
        publish_s: Publishing the result. From the time per row in earlier runs.
        runs: Number of earlier runs.
    """

    input_s: float
    plan_s: float
    load_s: float | None
    tail_s: float | None
    publish_s: float | None
    runs: int

    @property
    def total_s(self) -> float:
        """Return the forecast idle seconds of the run's devices: the sum of all causes whose time is known."""
        known = (self.load_s, self.tail_s, self.publish_s)
        return self.input_s + self.plan_s + sum(seconds for seconds in known if seconds is not None)


def idle_forecast(job: Job, rows: int, input_s: float, plan_s: float) -> IdleForecast:
    """Forecast how long the devices are idle in a run of the job.

    Args:
        job: The job.
        rows: Rows of the job.
        input_s: Measured seconds of reading the input.
        plan_s: Measured seconds of planning.
    """
    runs = earlier_idle(report_folder(job.results_root))
    if runs is None:
        return IdleForecast(input_s, plan_s, None, None, None, 0)
    a_row = runs.per_row("idle_publish_s")
    return IdleForecast(
        input_s, plan_s, runs.median("idle_load_s"), runs.median("idle_tail_s"), a_row * rows, runs.runs
    )
