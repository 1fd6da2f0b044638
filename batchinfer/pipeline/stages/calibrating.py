"""The calibration stage: the first run of a job calibrates its int4 weights."""

from __future__ import annotations

import time
from dataclasses import replace

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.plan.setup.weights import loss_of
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
    loss = None if setup.setting.parts.weights is None else loss_of(setup.setting.parts.weights)
    if loss is not None:
        run.report.note(int4_kl=loss.kl, int4_same_token=loss.same, int4_tokens=loss.tokens)
    return replace(run, setup=setup)
