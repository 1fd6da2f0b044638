"""The verbs about a job: run, validate, preview, schema, init."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from batchinfer import pipeline, verbs
from batchinfer.cli.options import Date, JobPath, Json, Overrides, Quiet, load, located, notice
from batchinfer.job import init_files, job_schema
from batchinfer.launch.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.report.summary import as_json, summary


@contextlib.contextmanager
def _watched(quiet: bool) -> Iterator[tuple[Progress, Interrupts]]:
    with Interrupts().installed() as interrupts, Progress(sys.stderr, quiet=quiet) as progress:
        yield progress, interrupts


def run(
    job_file: JobPath,
    overrides: Overrides = None,
    date: Date = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Try the job: only the first N rows, published to PATH-first-N."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of another job's results.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run rows again whose error was marked retryable.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the digests of what earlier runs stored.")
    ] = False,
    to_openai: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For an OpenAI batch input: also write an OpenAI batch output file."
        ),
    ] = None,
    openai_timestamps: Annotated[
        bool,
        typer.Option(
            "--openai-timestamps", help="Write this run's time as `created` into that file, instead of 0."
        ),
    ] = False,
    quiet: Quiet = False,
    as_line: Json = False,
) -> int:
    """Run a job, or carry on with it: what an earlier run finished is not computed again."""
    job = load(job_file, overrides, date)
    options = pipeline.RunOptions(limit, replace, retry_errors, verify, to_openai, openai_timestamps)
    with located(job), _watched(quiet or as_line) as (progress, interrupts):
        outcome = pipeline.run_job(job, options, progress, interrupts, lambda text: notice(quiet, text))
    if as_line:
        typer.echo(as_json(outcome.row))
    elif not quiet:
        typer.echo(summary(outcome.row))
    if outcome.error is not None:
        typer.echo(f"batchinfer: {outcome.error}", err=True)
    return outcome.exit_code


def validate(job_file: JobPath, overrides: Overrides = None, date: Date = None, quiet: Quiet = False) -> None:
    """Check a job as `run` does, first rows of every file included, without computing anything."""
    job = load(job_file, overrides, date)
    with located(job):
        lines = verbs.validate_job(job)
    if not quiet:
        typer.echo("\n".join([job.describe(), *lines]))


def preview(
    job_file: JobPath,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows to show.")] = 3,
    overrides: Overrides = None,
    date: Date = None,
) -> None:
    """Show the first rows as the model would read them: rendered text, tokens, parameters."""
    job = load(job_file, overrides, date)
    with located(job):
        for text in verbs.preview_job(job, rows):
            typer.echo(text)


def schema() -> None:
    """Print the JSON Schema of the job file, for editors that complete and check it."""
    typer.echo(json.dumps(job_schema(), indent=2))


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; made if missing.")],
    model: Annotated[str, typer.Option(help="Checkpoint folder that the job names.")] = "model",
) -> None:
    """Write a commented job that runs, with a few prompts, to start from."""
    # a job file's paths start from its folder
    written = model if model == "model" else os.path.relpath(model, folder)
    for path in verbs.init_folder(folder, init_files(written)):
        typer.echo(f"wrote {path}")
    typer.echo(f"next: batchinfer validate {folder / 'job.yaml'}")
