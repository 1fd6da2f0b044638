"""Measures the quality of a job's quantised model on prompts of its first rows."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.core.request import TokenIds
from batchinfer.core.sampling import Pooling
from batchinfer.core.statistics.quality import Quality
from batchinfer.core.wording import counted
from batchinfer.engine.config import QualityOrder
from batchinfer.job import Job
from batchinfer.pipeline.calibration.calibration import layer_progress
from batchinfer.pipeline.calibration.process import measure_in_child
from batchinfer.pipeline.calibration.prompts import first_prompts
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.plan.forecast.calibration import CalibrationSample, quality_forecast_s
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.report.progress import Progress

MAX_SHARE = 0.05  # of the forecast engine time that the measurement may take
MIN_ROWS = 8  # with fewer rows, the measurement says little


def measure_job_quality(
    job: Job,
    setup: Setup,
    progress: Progress,
    notice: Callable[[str], None],
    transport: Transport,
    forecast_s: float | None,
) -> Quality | None:
    """Measure the quality of a job's quantised model. Return None if the job has no valid row.

    Args:
        job: The job.
        setup: Its setup.
        progress: The progress display.
        notice: Shows a line to the user.
        transport: Starts the process that measures.
        forecast_s: The forecast engine time. None: unknown.

    Raises:
        BatchInferError: The input cannot be read, or the model cannot be loaded.
    """
    rows = job.engine.quality_rows
    progress.phase("reading", rows)
    prompts = first_prompts(job, setup, rows)
    if not prompts:
        return None
    fewer = prompts if forecast_s is None else prompts[: _affordable_rows(setup, prompts, forecast_s)]
    if len(fewer) < len(prompts):
        notice(
            f"quality is measured on {counted(len(fewer), 'row')}, as the job itself takes {forecast_s:.0f} s"
        )
    single = setup.setting.with_placement(replicas=1)
    return measure_in_child(
        QualityOrder(single.load_config(job), fewer, _pooling(setup)),
        layer_progress(progress, "measuring quality"),
        progress.tick,
        transport,
    )


def _affordable_rows(setup: Setup, prompts: tuple[TokenIds, ...], forecast_s: float) -> int:
    """Return the number of rows whose measurement takes MAX_SHARE of the engine time, at least MIN_ROWS."""
    sample = CalibrationSample(len(prompts), sum(map(len, prompts)), 0)
    needed_s = quality_forecast_s(setup, sample)
    if needed_s is None or needed_s <= MAX_SHARE * forecast_s:
        return len(prompts)
    return max(MIN_ROWS, int(len(prompts) * MAX_SHARE * forecast_s / needed_s))


def _pooling(setup: Setup) -> Pooling | None:
    """Return the pooling of hidden states if the job's answers are vectors or scores of pairs, else None."""
    requested = setup.requested
    pooled = requested.embedding or requested.pairs
    return None if pooled is None else pooled.pooling
