"""The verbs. The only place that prints, and that chooses an exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from batchinfer import __version__, pipeline, verbs
from batchinfer.bench.options import DEFAULT_MODEL, DEFAULT_WORKLOADS, BenchOptions
from batchinfer.bench.workloads import WORKLOADS
from batchinfer.errors import BatchInferError, Interrupted, JobFileError, StorageError, UsageError
from batchinfer.job import Job, init_files, job_schema, load_job
from batchinfer.launch.interrupts import Interrupts
from batchinfer.models.shapes import SHAPES
from batchinfer.report.progress import Progress
from batchinfer.report.summary import as_json, summary

app = typer.Typer(
    name="batchinfer",
    help="Offline batch inference: a table of prompts in, a Parquet table of answers out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobPath = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job file, e.g. engine.max_num_seqs=64."
    ),
]
Date = Annotated[
    str | None, typer.Option(metavar="YYYY-MM-DD", help="What ${date} stands for; today by default.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON on stdout instead of text.")]


def main() -> None:
    """The console script: runs a verb and ends the process with the exit code of what came of it."""
    logging.basicConfig(level=logging.WARNING, format="batchinfer: %(message)s")
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(arguments: list[str]) -> int:
    try:
        result = app(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except Exception as error:  # noqa: BLE001 - the last place that can turn it into an exit code
        return _explain(error, "--json" in arguments)
    except KeyboardInterrupt:
        return _explain(Interrupted(signal.SIGINT, "interrupted"), "--json" in arguments)


def _explain(error: Exception, as_line: bool) -> int:
    """Print what went wrong, and the exit code that it means."""
    code, text = _meaning(error)
    if as_line:
        typer.echo(json.dumps({"exit_code": code, "error": type(error).__name__, "message": text}))
    typer.echo(f"batchinfer: {text}", err=True)
    return code


def _meaning(error: Exception) -> tuple[int, str]:
    if isinstance(error, BatchInferError):
        return error.exit_code, str(error)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE, "the reader of the output has gone"
    if isinstance(error, MemoryError):
        return 71, "out of memory; lower engine.kv_memory, or run on a machine with more"
    if isinstance(error, OSError):
        return StorageError.exit_code, f"{error}; the same command continues once that is mended"
    told = getattr(error, "format_message", None)
    if told is not None:  # a usage error of click's; typer brings its own click, whose class cannot be named
        return UsageError.exit_code, f"{told()} (see `batchinfer --help`)"
    detail = "".join(traceback.format_exception(error))
    return BatchInferError.exit_code, f"a bug in batchinfer {__version__}, please report it:\n{detail}"


def _load(path: Path, overrides: list[str] | None, date: str | None) -> Job:
    pairs = []
    for text in overrides or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {text}: wanted KEY=VALUE, e.g. --set engine.max_num_seqs=64")
        pairs.append((key.strip(), value))
    return load_job(path, pairs, date)


@contextlib.contextmanager
def _located(job: Job) -> Iterator[None]:
    """What turns out to be wrong with the job file only later is told with its line, too."""
    try:
        yield
    except JobFileError as error:
        raise job.located(error) from error


def _notice(quiet: bool, text: str) -> None:
    if not quiet:
        typer.echo(text, err=True)


@contextlib.contextmanager
def _watched(quiet: bool) -> Iterator[tuple[Progress, Interrupts]]:
    with Interrupts().installed() as interrupts, Progress(sys.stderr, quiet=quiet) as progress:
        yield progress, interrupts


@app.command()
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
    quiet: Quiet = False,
    as_line: Json = False,
) -> int:
    """Run a job, or carry on with it: what an earlier run finished is not computed again."""
    job = _load(job_file, overrides, date)
    options = pipeline.RunOptions(limit, replace, retry_errors, verify, to_openai)
    with _located(job), _watched(quiet or as_line) as (progress, interrupts):
        outcome = pipeline.run_job(job, options, progress, interrupts, lambda text: _notice(quiet, text))
    if as_line:
        typer.echo(as_json(outcome.row))
    elif not quiet:
        typer.echo(summary(outcome.row))
    if outcome.error is not None:
        typer.echo(f"batchinfer: {outcome.error}", err=True)
    return outcome.exit_code


@app.command()
def validate(job_file: JobPath, overrides: Overrides = None, date: Date = None, quiet: Quiet = False) -> None:
    """Check a job file, its checkpoint and that its input exists, without running anything."""
    job = _load(job_file, overrides, date)
    with _located(job):
        lines = verbs.validate_job(job)
    if not quiet:
        typer.echo("\n".join([job.describe(), *lines]))


@app.command()
def preview(
    job_file: JobPath,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows to show.")] = 3,
    overrides: Overrides = None,
    date: Date = None,
) -> None:
    """Show the first rows as the model would read them: rendered text, tokens, parameters."""
    job = _load(job_file, overrides, date)
    with _located(job):
        for text in verbs.preview_job(job, rows):
            typer.echo(text)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the job file, for editors that complete and check it."""
    typer.echo(json.dumps(job_schema(), indent=2))


@app.command()
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


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure this machine's peaks, so that reports can compare with them."
        ),
    ] = False,
) -> None:
    """Say what this machine has, and what batchinfer knows of it."""
    if measure:
        typer.echo("measuring matrix products and memory, a few seconds ...", err=True)
        typer.echo(f"wrote {verbs.measure_hardware()}", err=True)
    facts = verbs.machine_facts()
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        typer.echo(f"{fact.name:<{width}}  {fact.value}")


@app.command()
def query(
    results: Annotated[Path, typer.Argument(metavar="RESULT", help="A result folder.")],
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="DuckDB SQL; the table is called results.")
    ] = "FROM results LIMIT 20",
    partial: Annotated[
        bool, typer.Option("--partial", help="Read what an unfinished run has committed so far.")
    ] = False,
) -> None:
    """Query a result folder with DuckDB."""
    typer.echo(verbs.query_results(results, sql, partial))


@app.command()
def verify(results: Annotated[Path, typer.Argument(metavar="RESULT", help="A result folder.")]) -> int:
    """Read a result and its stored completions whole, and check every checksum."""
    problems = verbs.verify_results(results)
    for problem in problems:
        typer.echo(f"{problem.path}: {problem.message}", err=True)
    typer.echo(f"{len(problems)} problem{'' if len(problems) == 1 else 's'} found in {results}")
    return StorageError.exit_code if problems else 0


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD]...",
            help=f"Any of {', '.join(WORKLOADS)}; {' '.join(DEFAULT_WORKLOADS)} by default.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"A shape run on dummy weights ({', '.join(SHAPES)}), or a checkpoint folder.")
    ] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[str, typer.Option(help="Of the linear layers' weights: none or int8.")] = "none",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="With numbers that depend on nothing but the row.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; one a core by default.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences in a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in a step.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Rows of each workload, instead of its own number.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Runs that count, after one that does not.")] = 3,
    against: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="Do the same work with it, in turns: transformers.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the workload as JSONL for another engine, and run nothing."),
    ] = None,
) -> None:
    """Measure how near to this machine's limit the engine comes. The last line of stdout is JSON."""
    names = tuple(workloads or DEFAULT_WORKLOADS)
    options = BenchOptions(
        names, model, dtype, quantization, deterministic, device, threads,
        max_num_seqs, max_num_batched_tokens, rows, repeat, against, export,
    )  # fmt: skip
    text, facts = verbs.bench(options, lambda line: typer.echo(line, err=True))
    typer.echo(text)
    typer.echo(json.dumps(facts))


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Offline batch inference."""
    if version:
        typer.echo(f"batchinfer {__version__}")
        raise typer.Exit


if os.name != "posix":  # flock, spawn and signals as we use them
    raise SystemExit("batchinfer runs on Linux and macOS")
