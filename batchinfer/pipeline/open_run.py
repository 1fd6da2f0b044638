"""The first stage of a run: checks the job, takes its lock, and creates the objects that later stages share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.job import Job
from batchinfer.pipeline.engine_machine import engine_machine
from batchinfer.pipeline.openai_file import openai_file
from batchinfer.pipeline.operators_build import OperatorsBuild, build_in_background
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import RunReport
from batchinfer.pipeline.stop_text import stop_line, stopped_early_text
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.pipeline.workers.interrupts import CONTINUES, Interrupts
from batchinfer.pipeline.workers.launch import Launch
from batchinfer.plan.setup.job_setup import Setup, check_setup
from batchinfer.report.progress import Progress
from batchinfer.report.stopwatch import Stopwatch
from batchinfer.store.results.output_file import OutputFile


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The objects that all stages of a run share. The run holds the lock of its job.

    Attributes:
        job: The job. In a trial, it has only the first rows.
        full_job: The job without the limit of a trial.
        options: The options of the run.
        setup: The checked model, setting, tokenizer and kind of answers.
        state: The state folder of the job.
        openai: The file of --to-openai. None without that option.
        operators: The background compilation of CPU operators.
        launch: Workers that start and load weights before the plan is known.
        report: Collects the facts of the run.
        progress: The progress display.
        interrupts: Handles signals and the stop time.
        notice: Shows a line to the user.
        now: Start of the run. The same for all stages, because a run may pass midnight.
        at_end: Callbacks to call before the lock is released.
    """

    job: Job
    full_job: Job
    options: RunOptions
    setup: Setup
    state: StateFolder
    openai: OutputFile | None
    operators: OperatorsBuild
    launch: Launch
    report: RunReport
    progress: Progress
    interrupts: Interrupts
    notice: Callable[[str], None]
    now: datetime
    at_end: ExitStack


@contextmanager
def open_run(
    job: Job, options: RunOptions, progress: Progress, interrupts: Interrupts, notice: Callable[[str], None]
) -> Iterator[OpenRun]:
    """Check a job, and hold its lock within the block. Missing CPU operators are compiled in the background.

    Args:
        job: The job.
        options: The options of the run.
        progress: The progress display.
        interrupts: Handles signals and the stop time.
        notice: Called with lines for the user.

    Raises:
        Locked: Another run holds the lock.
        BatchInferError: The job cannot run, or the file of --to-openai cannot be written.
    """
    watch, stop = Stopwatch(options.already_s), options.stop_at
    full_state, full_job = state_of(job), job
    if options.limit is not None:
        job = job.first_rows(options.limit)
    state = state_of(job)
    machine = engine_machine(
        job, state, options.transport, notice, waiting=lambda: interrupts.raise_pending(CONTINUES)
    )
    setup = check_setup(job, state, machine.facts, options.replace, machine.reader)
    timestamps = options.openai_timestamps
    openai = openai_file(
        job, options.to_openai, state, full_state, timestamps=timestamps, replace=options.replace
    )
    with (
        state.lock(),
        interrupts.stopping_at(None if stop is None else stop.at, stopped_early_text(job, options)),
        ExitStack() as at_end,
        build_in_background(
            setup.setting.numerics, notice, options.engine == ENGINE and job.ray is None
        ) as operators,
    ):
        options = replace(options, transport=machine.transport)
        report = RunReport(job, setup.setting, watch)
        report.note(trial=options.limit is not None, price_per_hour=options.price_per_hour)
        now = datetime.now().astimezone()
        if stop is not None:
            notice(stop_line(stop, now))
        launch = Launch(options.transport, options.standby)
        yield OpenRun(
            job,
            full_job,
            options,
            setup,
            state,
            openai,
            operators,
            launch,
            report,
            progress,
            interrupts,
            notice,
            now,
            at_end,
        )
