"""Commands for jobs: run, plan, validate, preview and init."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import DEFAULT_JOB, Date, JobPath, Json, Overrides, Price, Quiet, Ray, load
from batchinfer.cli.terminal import (
    columns_of_terminal,
    is_terminal,
    paint,
    say,
    say_json,
    say_verbatim,
    tell,
    tell_error,
)
from batchinfer.core.errors import StorageError
from batchinfer.core.hub import ModelName
from batchinfer.core.text import printable
from batchinfer.machine.datasheet import NAMES

if TYPE_CHECKING:
    from batchinfer.job import Job
    from batchinfer.job.deadline import StopTime
    from batchinfer.pipeline.result import RunResult
    from batchinfer.report.progress import Progress


Limit = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Try the job: run only the first N rows, and publish them to PATH-first-N. A later run of the whole "
        "job reuses their answers.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace",
        help="Replace results of another job, or a file of `--to-openai` that this job did not write.",
    ),
]
RetryErrors = Annotated[
    bool, typer.Option("--retry-errors", help="Run the rows again whose error was marked retryable.")
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Read the result and the stored answers in full and check their digests, instead of trusting "
        "[remembered digests](resume.md#damaged-files). Damaged files are rebuilt.",
    ),
]
ToOpenai = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For an OpenAI batch input: also write an [OpenAI batch output file](output.md#--to-openai-file). A "
        "file that this job did not write is kept (exit code 73) unless `--replace` is given.",
    ),
]
OpenaiTimestamps = Annotated[
    bool,
    typer.Option(
        "--openai-timestamps", help="With `--to-openai`: write this run's time as `created`, instead of 0."
    ),
]


StopAt = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="[Stop at this time](#stopping-at-a-given-time), to continue later: `06:00` (its next occurrence), or "
        "a timestamp such as `2027-01-31T06:00`.",
    ),
]


def run(
    job_file: JobPath = DEFAULT_JOB,
    overrides: Overrides = None,
    ray: Ray = None,
    date: Date = None,
    limit: Limit = None,
    replace: Replace = False,
    retry_errors: RetryErrors = False,
    verify: Verify = False,
    to_openai: ToOpenai = None,
    openai_timestamps: OpenaiTimestamps = False,
    price_per_hour: Price = None,
    stop_at: StopAt = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Run a job, or continue it: answers of earlier runs are not computed again."""
    from batchinfer.pipeline.workers import standby as engines

    stops = _stop_time(stop_at)
    with nullcontext() if ray else engines.EngineStandby() as standby:
        job = load(job_file, overrides, date, ray)
        progress = _open_progress(job, quiet, as_json)
        # Slow imports, after the first line was printed
        from batchinfer.pipeline.library import run_loaded
        from batchinfer.pipeline.options import RunOptions
        from batchinfer.report.stopwatch import process_age_s

        options = RunOptions(
            limit=limit,
            replace=replace,
            retry_errors=retry_errors,
            verify=verify,
            to_openai=to_openai,
            openai_timestamps=openai_timestamps,
            price_per_hour=price_per_hour,
            stop_at=stops,
            standby=standby,
            already_s=process_age_s(),
        )
        result = run_loaded(job, options, progress, _silent if quiet else progress.note)
    _show(result, job, quiet, as_json)
    return result.exit_code


def _stop_time(text: str | None) -> StopTime | None:
    from batchinfer.job.deadline import StopTime

    return None if text is None else StopTime.of(text, datetime.now().astimezone())


def _open_progress(job: Job, quiet: bool, as_json: bool) -> Progress:
    from batchinfer.report.progress import Progress
    from batchinfer.verbs.opening import input_line

    progress = Progress(sys.stderr, job=job.name, quiet=quiet or as_json)
    if not quiet:
        with job.located():
            line = input_line(job)
        if line is not None:
            progress.note(line)
    return progress


def _silent(_: str) -> None:
    """Drop a note instead of printing it, for --quiet."""


def _show(result: RunResult, job: Job, quiet: bool, as_json: bool) -> None:
    # StorageError if stdout cannot be written, except if the reader of a pipe has gone
    row = result.row
    try:
        if as_json:
            shown = say_json({**row, "message": result.message})
        else:
            shown = quiet or say(_painted(_summary(result, job), not row["exit_code"]))
    except OSError as error:
        raise StorageError(
            f"{row['output']}: {row['exit_status']}; stdout cannot be written: {error}"
        ) from error
    if not shown:
        tell(
            f"{row['job']}: {printable(str(row['exit_status']))}; stdout is closed, so the summary is not printed"
        )
    if result.message is not None:
        tell_error(result.message)


def _summary(result: RunResult, job: Job) -> str:
    # Example answers only on a terminal, to keep answers out of logs
    from batchinfer.report.summary import NAME_END, summary

    examples: list[str] = []
    if is_terminal(sys.stdout):
        from batchinfer.verbs.show import example_lines

        examples = example_lines(result.results, columns_of_terminal(sys.stdout) - NAME_END)
    return summary(result.row, result.report, labels=job.task == "classify", examples=examples)


def _painted(text: str, good: bool) -> str:
    from batchinfer.report.summary import NAME_END

    first, *rest = text.splitlines()
    lines = [paint(line[:NAME_END], "quiet") + paint(line[NAME_END:]) for line in rest]
    return "\n".join([paint(first, "good" if good else "bad"), *lines])


def validate(
    job_file: JobPath = DEFAULT_JOB,
    overrides: Overrides = None,
    ray: Ray = None,
    date: Date = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Show every option, also options with their default value.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check a job as `run` does, including the first rows of every file, without computing anything."""
    from batchinfer.verbs.validate import validate_job

    job = load(job_file, overrides, date, ray)
    with job.located():
        found = validate_job(job)
    if as_json:
        options = job.model_dump(mode="json")
        say_json({"exit_code": 0, "path": str(job.source), "options": options, "found": found})
    elif not quiet:
        head, *lines = job.describe(defaults).splitlines()
        if not defaults:
            lines.append("  all other options have their default values (--defaults shows them)")
        say("\n".join([paint(head, "heading"), *map(paint, [*lines, *found])]))


def preview(
    job_file: JobPath = DEFAULT_JOB,
    rows: Annotated[
        int, typer.Option("--rows", "-n", min=1, metavar="N", help="Number of rows to show.")
    ] = 3,
    overrides: Overrides = None,
    ray: Ray = None,
    date: Date = None,
    as_json: Json = False,
) -> None:
    """Show the first rows as the model would read them: rendered text, tokens, parameters."""
    from batchinfer.verbs.preview import preview_job, sampling_of_all

    job = load(job_file, overrides, date, ray)
    first = not as_json
    with job.located():
        for row in preview_job(job, rows, tell):
            if first:
                say(printable("\n".join([*sampling_of_all(job), ""])))
                first = False
            if as_json:
                say_json(asdict(row))
            else:
                say_verbatim(
                    "\n".join([paint(row.head, "heading"), paint(row.body, "bad" if row.error else None)])
                )


HardwareName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Forecast for this GPU instead of this machine: {', '.join(NAMES)}, or its name as `nvidia-smi` prints "
        "it. `8xh100` is one machine with 8 GPUs, `4x8xh100` are four of them; 64 GPUs at most.",
    ),
]
Sample = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Render and tokenise only about N rows: groups of 16 successive rows from all parts of the files. "
        "Counts are scaled to all rows.",
    ),
]


def plan(
    job_file: JobPath = DEFAULT_JOB,
    overrides: Overrides = None,
    ray: Ray = None,
    date: Date = None,
    price_per_hour: Price = None,
    hardware: HardwareName = None,
    sample: Sample = None,
    stop_at: StopAt = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the plan, without progress and notes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read every row, and print the work of a run and its expected time, without loading the model."""
    from batchinfer.filesystem.state import state_of
    from batchinfer.machine.devices import devices_by_name
    from batchinfer.pipeline.engine_machine import engine_machine
    from batchinfer.plan.forecast.job import forecast_job
    from batchinfer.plan.forecast.text import forecast_json, forecast_lines
    from batchinfer.report.progress import Progress

    machine = None if hardware is None else devices_by_name(hardware)
    stops = _stop_time(stop_at)
    job = load(job_file, overrides, date, ray)
    with job.located(), Progress(sys.stderr, job=job.name, quiet=quiet or as_json) as progress:
        on_cluster = job.ray is not None and machine is None
        facts = engine_machine(job, state_of(job), notice=progress.note).facts if on_cluster else None
        progress.phase("reading", job.input.limit)
        found = forecast_job(
            job,
            lambda at: progress.read(at.rows, at.bytes_read, at.bytes_total),
            _silent if quiet else progress.note,
            machine,
            sample,
            None if stops is None else stops.at,
            facts,
        )
    if as_json:
        say_json({"exit_code": 0, **forecast_json(found, price_per_hour)})
        return
    first, *lines = forecast_lines(found, price_per_hour)
    say(printable("\n".join([paint(first, "heading"), *map(paint, lines)])))


def init(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Folder to write; created if missing. A job that is already in the folder is kept.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model that the job names: a checkpoint folder, or `org/name` in the [Hugging Face "
            "cache](models.md#models-by-name). By default a small model, copied into DIR.",
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="SCHEMA.JSON",
            help="[JSON Schema](structured.md) that answers match; it is copied into DIR. A schema that no answer can "
            "match is refused (exit code 65).",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a commented job that runs, with a few prompts, to start from."""
    from batchinfer.verbs.starter import write_starter

    starter = write_starter(folder, model, schema)
    job = folder / "job.yaml"
    if as_json:
        wrote = [str(path) for path in starter.wrote]
        say_json({"exit_code": 0, "wrote": wrote, "model": str(starter.model), "ready": starter.ready})
        return
    for path in starter.wrote:
        say(paint(f"wrote {path}"))
    if not starter.ready:
        say(paint(_missing_model(starter.model)))
    if starter.stand_in:
        say(paint(_STAND_IN.format(model=starter.model)))
    quoted = shlex.quote(str(job))
    say(paint(f"next: batchinfer validate {quoted} && batchinfer run {quoted}"))


_STAND_IN = (
    "the job runs with the quickstart's model, {model}: its answers follow the schema, but mean nothing; for useful "
    "answers name a model of your own in job.yaml, or with --model"
)


def _missing_model(model: Path | ModelName) -> str:
    if isinstance(model, ModelName):
        return f"first run: batchinfer pull {shlex.quote(str(model))}"
    return (
        f"first put a checkpoint into {model}: config.json, *.safetensors and tokenizer.json, e.g. by\n"
        f"  hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir {shlex.quote(str(model))}"
    )
