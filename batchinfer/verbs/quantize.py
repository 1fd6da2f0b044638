"""Implements `batchinfer quantize`: calibrates a job's model for int4 on the job's rows.

The weights are for the job itself, or for a checkpoint folder.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.statistics.quality import Quality
from batchinfer.filesystem.durable import TEMPORARY, FileOps, refuse_existing, storage
from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.job import Job
from batchinfer.machine.facts import this_machine
from batchinfer.pipeline.calibration.calibration import Listener, calibrated_setup, write_calibrated
from batchinfer.plan.setup.input_check import check_input
from batchinfer.plan.setup.job_setup import Setup, check_setup
from batchinfer.plan.setup.weights import loss_of


@dataclass(frozen=True, slots=True)
class QuantizedModel:
    """The result of calibrating a model for int4.

    Attributes:
        folder: The folder with the int4 weights.
        loss: How much the int4 weights change the model's predictions, or None if no row was left to measure it.
        made: True if this command calibrated the weights, False if an earlier run did.
    """

    folder: Path
    loss: Quality | None
    made: bool


def quantize_job(job: Job, again: bool, listener: Listener) -> QuantizedModel:
    """Calibrate the weights of a job's model for int4, as the job's first run would do. Later runs use the weights.

    Args:
        job: The job.
        again: True to calibrate again, False to keep weights that an earlier run has calibrated.
        listener: Receives the progress.

    Raises:
        JobFileError: The model cannot be calibrated, or no row can be run.
    """
    job = _in_int4(job)
    state = state_of(job)
    setup = _checked(job, state)
    with state.lock():
        if again and setup.setting.parts.weights is not None:
            with state.lock_shared(), storage(state.int4, "remove"):
                state.ops.remove_tree(setup.setting.parts.weights)
            setup = check_setup(job, state, this_machine(job.engine.device), replace=True)
        found = calibrated_setup(job, setup, state, listener)
    folder = found.setting.parts.weights
    if folder is None:
        raise _no_rows(job)
    return QuantizedModel(folder, loss_of(folder), found is not setup)


def export_job_model(job: Job, output: Path, group: int, listener: Listener) -> QuantizedModel:
    """Calibrate a job's model for int4 on the job's rows, and write it as a checkpoint to a new folder.

    Args:
        job: The job.
        output: The new folder.
        group: The number of inputs of a layer that share a scale.
        listener: Receives the progress.

    Raises:
        OutputConflict: The folder exists.
        JobFileError: The model cannot be calibrated, or no row can be run.
    """
    refuse_existing(output)
    if job.model.adapters:
        raise job.mistake(
            "model.adapters",
            "do not fit a calibrated model, whose channels are others, but in the job itself: leave them out "
            "(--set model.adapters=null), or merge them into the model (PEFT: merge_and_unload)",
        )
    job = _in_int4(job)
    setup, ops = _checked(job, state_of(job)), FileOps()
    making = output.with_name(f".batchinfer-{uuid.uuid4().hex[:16]}{TEMPORARY}")
    try:
        if not write_calibrated(job, setup, making, listener, group):
            raise _no_rows(job)
        with storage(output, "make"):
            ops.rename(making, output)
            ops.fsync_folder(output.absolute().parent)
    finally:
        if making.exists():
            with storage(making, "remove"):
                ops.remove_tree(making)
    return QuantizedModel(output, loss_of(output), True)


def _in_int4(job: Job) -> Job:
    model = job.model.model_copy(update={"quantization": "int4", "calibration": "auto"})
    return job.model_copy(update={"model": model})


def _checked(job: Job, state: StateFolder) -> Setup:
    setup = check_setup(job, state, this_machine(job.engine.device), replace=True)
    if not setup.setting.numerics.calibrates:
        raise job.mistake(
            "model.path", "cannot be calibrated: wanted a decoder of docs/models.md whose weights are floats"
        )
    check_input(job, setup, state)
    return setup


def _no_rows(job: Job) -> Exception:
    return job.mistake("input.path", "has no row that can be run, and a model is calibrated on rows")
