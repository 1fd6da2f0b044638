"""Calibrates int4 weights with prompts of the job, and stores them in its state folder for later runs."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from batchinfer.core.statistics.quality import Quality
from batchinfer.core.wording import counted, rough_duration
from batchinfer.engine.config import CalibrationOrder
from batchinfer.filesystem.durable import FileOps, check_free_space, storage, write_json
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.models.calibration.work import MIN_EXPERT_TOKENS, CalibrationOutcome
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.models.spec.spec import INT4_GROUP
from batchinfer.pipeline.calibration.process import calibrate_in_child
from batchinfer.pipeline.calibration.prompts import calibration_prompts
from batchinfer.pipeline.workers.transport import PROCESSES, Transport
from batchinfer.plan.forecast.calibration import CalibrationSample, calibration_forecast
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.weights import (
    ANSWER_TOKENS,
    RECORD,
    calibrated_folder,
    record_of,
    with_calibration,
)
from batchinfer.report.progress import Phase, Progress

MOST_WEIGHTS = 0.8  # share of a GPU's memory; the rest is for the KV cache, activations and graphs
WAY_OUT = "set model.calibration: off"
_MAKING = "making"  # the folder of incomplete weights


@dataclass(frozen=True, slots=True)
class Listener:
    """Receives the progress of a calibration, and notices for the user.

    Attributes:
        progress: The progress display.
        notice: Shows a line to the user.
    """

    progress: Progress
    notice: Callable[[str], None]


def calibrated_setup(
    job: Job, setup: Setup, state: StateFolder, listener: Listener, transport: Transport = PROCESSES
) -> Setup:
    """Return a job's setup with calibrated int4 weights, after a calibration if the state folder has none.

    The setup is unchanged if the job does not calibrate, or has no valid row.

    Args:
        job: The job.
        setup: The setup of the job.
        state: The state folder of the job, which stores the weights.
        listener: Receives progress and notices.
        transport: Starts the process that calibrates.

    Raises:
        BatchInferError: The input cannot be read, the model cannot be loaded, or the weights cannot be written.
    """
    if not setup.setting.numerics.calibrates or setup.setting.parts.weights is not None:
        return setup
    with _calibration_lock(state, listener.notice):
        folder = calibrated_folder(setup.checkpoint, state, bool(job.model.adapters), remember=True)
        if not (folder / RECORD).exists():
            if not write_calibrated(job, setup, state.int4 / _MAKING, listener, transport=transport):
                return setup
            _keep_weights(state, folder)
    checkpoint, setting = with_calibration(job, setup.checkpoint, setup.setting, state)
    return replace(setup, checkpoint=checkpoint, setting=setting)


def write_calibrated(
    job: Job,
    setup: Setup,
    folder: Path,
    listener: Listener,
    group: int = INT4_GROUP,
    transport: Transport = PROCESSES,
) -> bool:
    """Calibrate the model of a job to int4, and write it to a folder, which is emptied first.

    Args:
        job: The job.
        setup: The setup of the job.
        folder: The folder of the calibrated weights.
        listener: Receives progress and notices.
        group: Number of values that share a scale.
        transport: Starts the process that calibrates.

    Returns:
        False if the job has no valid row; then nothing is written.

    Raises:
        BatchInferError: The input cannot be read, the model cannot be loaded, or the weights cannot be written.
    """
    listener.progress.phase("reading", job.input.limit)
    prompts = calibration_prompts(job, setup)
    if not prompts:
        return False
    tokens = sum(map(len, prompts))
    with storage(folder, "make"):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    check_free_space(
        folder, setup.checkpoint.weight_bytes, f"{folder}: calibrated weights need up to", WAY_OUT
    )
    single = setup.setting.with_placement(replicas=1).with_parts(weights=None)
    load = single.with_numerics(quantization="int4").load_config(job)
    longest = min(ANSWER_TOKENS, setup.setting.numerics.max_model_len)
    answers = longest if _can_answer(job, setup, listener.notice) else 0
    expected = calibration_forecast(setup, CalibrationSample(len(prompts), tokens, answers), group).seconds
    takes = "" if expected is None else f", for about {rough_duration(expected)}"
    listener.notice(
        f"calibrating int4 weights, once, on {counted(len(prompts), 'row')} with {tokens:,} tokens{takes}"
    )
    began = time.monotonic()
    found = calibrate_in_child(
        CalibrationOrder(load, prompts, answers, folder, group, bool(job.model.adapters)),
        layer_progress(listener.progress, "calibrating"),
        listener.progress.tick,
        transport,
    )
    write_json(folder / RECORD, record_of(found.loss), FileOps())
    loss = "" if found.loss is None else f": {loss_text(found.loss)}"
    listener.notice(f"calibrated in {rough_duration(time.monotonic() - began)}{loss}")
    if found.few:
        listener.notice(few_text(found))
    return True


def _can_answer(job: Job, setup: Setup, notice: Callable[[str], None]) -> bool:
    """Return True if the model should generate answers to the calibration prompts, as further calibration data.

    The job must generate text, and the int4 model must fit on the one GPU that calibrates it layer by layer.
    """
    if job.task != "generate":
        return False
    setting, placement, checkpoint = setup.setting, setup.setting.placement, setup.checkpoint
    memory = placement.hardware.memory_bytes
    divided = setting.device == "cuda" and placement.division.ranks > 1
    if not divided or memory is None or not isinstance(checkpoint, Checkpoint):
        return True
    weights = loaded_bytes(
        checkpoint.spec.quantized("int4"), checkpoint.parameters, setting.numerics.itemsize
    )
    fits = weights <= memory * MOST_WEIGHTS
    if not fits:
        notice("in int4 the model is too large for one GPU: it is calibrated on the prompts, without answers")
    return fits


def loss_text(loss: Quality) -> str:
    """Return a phrase for the user about the loss of quality of calibrated weights."""
    return f"on rows held out, {loss}"


def few_text(found: CalibrationOutcome) -> str:
    """Return a sentence for the user about the number of experts with few calibration tokens."""
    return (
        f"{found.few:,} of {counted(found.experts, 'expert')} had fewer than {MIN_EXPERT_TOKENS} tokens of these rows, "
        "and were calibrated on tokens of other experts, too"
    )


def layer_progress(progress: Progress, phase: Phase) -> Callable[[int, int], None]:
    """Return a function that shows finished layers on a progress display.

    The function's arguments are the numbers of finished layers and of all layers. Its first call must have 0
    finished layers.

    Args:
        progress: The display.
        phase: The name of the work, such as "calibrating".
    """

    def show(done: int, count: int) -> None:
        if done:
            progress.rows(1)
        else:
            progress.phase(phase, count)

    return show


def _keep_weights(state: StateFolder, folder: Path) -> None:
    with state.lock_shared(), storage(folder, "make"):
        if state.parts_in_use() == [state.path]:
            for other in state.int4.iterdir():
                if other.is_dir() and other.name != _MAKING:
                    state.ops.remove_tree(other)
        state.ops.rename(state.int4 / _MAKING, folder)
        state.ops.fsync_folder(state.int4)


@contextmanager
def _calibration_lock(state: StateFolder, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock within the block, so that only one run of the job calibrates at a time."""
    lock = state.int4 / "lock"
    with storage(lock, "open"):
        state.ops.mkdir(state.int4, 0o700)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with storage(lock, "lock"):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notice("another run of the job calibrates the weights; this one waits for it")
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
