"""The stages that calibrate a run's int4 weights, and that measure the quality of quantised weights."""

from __future__ import annotations

import time
from dataclasses import replace

from batchinfer.core.statistics.quality import Quality
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.plan.setup.quality import (
    check_quality_limits,
    quality_line,
    quantises,
    store_quality,
    stored_quality,
    why_not_measured,
)
from batchinfer.report.stopwatch import OTHER


def calibrate_weights(run: OpenRun) -> OpenRun:
    """Calibrate the int4 weights of a job, unless an earlier run did, and return the run with these weights.

    Returns the run unchanged if the job does not calibrate. A trial uses the weights of the whole job.
    """
    if not run.setup.setting.numerics.calibrates or run.options.engine != ENGINE:
        return run
    from batchinfer.pipeline.calibration.calibration import (  # imported late, because few jobs calibrate
        Listener,
        calibrated_setup,
    )

    began, had = time.monotonic(), run.setup.setting.parts.weights
    with run.report.timed(OTHER):
        listener = Listener(run.progress, run.notice)
        setup = calibrated_setup(run.full_job, run.setup, run.state, listener, run.options.transport)
    if had is None and setup.setting.parts.weights is not None:
        run.report.note(calibration_s=time.monotonic() - began)
    return replace(run, setup=setup)


def check_quality(run: OpenRun, forecast_s: float | None = None) -> None:
    """Measure the quality of the run's quantised model, unless an earlier run did, and record it in the report.

    A warning tells the user if the quality is low.

    Args:
        run: The run.
        forecast_s: The forecast engine time. None: unknown.

    Raises:
        QualityTooLow: The quality is beyond the limits of the job.
        BatchInferError: The input cannot be read, or the model cannot be loaded.
    """
    job, setup = run.job, run.setup
    if not quantises(setup) or run.options.engine != ENGINE:
        return
    found = stored_quality(job, setup, run.state)
    if found is None and job.engine.quality_rows:
        why = why_not_measured(setup)
        if why is not None:
            run.notice(f"the quality of {setup.setting.numerics.text} is not measured: {why}")
            return
        found = _measure(run, forecast_s)
    if found is None:
        return
    run.report.note(
        quality_kl=found.kl,
        quality_top1=found.top1,
        quality_cosine=found.cosine,
        quality_positions=found.positions,
    )
    check_quality_limits(job, found)
    run.notice(quality_line(setup, found))


def _measure(run: OpenRun, forecast_s: float | None) -> Quality | None:
    """Measure the quality and store it. Return None if the job has no valid row."""
    from batchinfer.pipeline.calibration.quality import measure_job_quality  # only quantised jobs need it

    began = time.monotonic()
    with run.report.timed(OTHER):
        found = measure_job_quality(
            run.job, run.setup, run.progress, run.notice, run.options.transport, forecast_s
        )
        if found is not None:
            store_quality(run.job, run.setup, run.state, found)
    run.report.note(quality_s=time.monotonic() - began)
    return found
