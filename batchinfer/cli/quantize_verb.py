"""The command `quantize`, which calibrates a job's model for int4."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import DEFAULT_JOB, Date, JobPath, Json, Overrides, Quiet, load, pairs_of
from batchinfer.cli.terminal import paint, say, say_json
from batchinfer.core.errors import UsageError
from batchinfer.pipeline.workers.interrupts import Interrupts

if TYPE_CHECKING:
    from batchinfer.job import Job

GROUPS = (32, 64, 128)


def quantize(
    job_file: JobPath = DEFAULT_JOB,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write a checkpoint (compressed-tensors, w4a16) to a new folder, for any engine, instead of keeping "
            "the weights for the job.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With `--output`: calibrate on the prompts of this file. A model, a folder or `org/name`, then "
            "replaces the job file.",
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With `--output`: number of inputs that share a scale, 32 (default), 64 or 128. Layers with other "
            "sizes stay in floats.",
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option("--again", help="Without `--output`: calibrate again, on the current rows of the job."),
    ] = False,
    overrides: Overrides = None,
    date: Date = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Calibrate a job's model for int4 on the job's rows, as its first run would, or a model on a file of prompts."""
    if group is not None and (output is None or group not in GROUPS):
        raise UsageError(f"--group {group}: wanted 32, 64 or 128, together with --output")
    if again and output is not None:
        raise UsageError("--again cannot be combined with --output, which always calibrates; leave it out")
    if prompts is not None and (output is None or job_file == DEFAULT_JOB):
        raise UsageError("--prompts works with a model in place of the job, and with --output")
    with TemporaryDirectory(prefix="batchinfer-") as scratch:
        job = (
            _of_prompts(job_file, prompts, Path(scratch), overrides)
            if prompts
            else load(job_file, overrides, date)
        )
        _quantize(job, output, group or GROUPS[0], again, quiet, as_json)


def _of_prompts(model: Path, prompts: Path, scratch: Path, overrides: Overrides) -> Job:
    from batchinfer.verbs.prompts_job import prompts_job

    return prompts_job(str(model), prompts, scratch, pairs_of(overrides))


def _quantize(job: Job, output: Path | None, group: int, again: bool, quiet: bool, as_json: bool) -> None:
    from batchinfer.pipeline.calibration.calibration import Listener, loss_text
    from batchinfer.plan.setup.weights import record_of
    from batchinfer.report.progress import Progress
    from batchinfer.verbs.quantize import export_job_model, quantize_job

    progress = Progress(sys.stderr, job=job.name, quiet=quiet or as_json)
    listener = Listener(progress, (lambda _: None) if quiet else progress.note)
    with Interrupts("interrupted; nothing was kept").installed(), job.located(), progress:
        if output is None:
            found = quantize_job(job, again, listener)
        else:
            found = export_job_model(job, output, group, listener)
    if as_json:
        loss = record_of(found.loss)["loss"]
        say_json({"exit_code": 0, "folder": str(found.folder), "made": found.made, "loss": loss})
    elif not quiet:
        lost = "no row was held out" if found.loss is None else loss_text(found.loss)
        say(paint(f"{found.folder} ({'calibrated now' if found.made else 'was there already'}): {lost}"))
