"""Arguments and options that several commands share, and how a command loads its job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.core.errors import UsageError

if TYPE_CHECKING:
    from batchinfer.job import Job

JobPath = Annotated[
    Path,
    typer.Argument(metavar="[JOB.YAML]", help="The [job file](job-file.md), or the folder of a `job.yaml`."),
]
DEFAULT_JOB = Path("job.yaml")  # in the current folder
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the job file, such as `engine.max_num_seqs=64`. May be repeated.",
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run the engines on this [Ray cluster](ray.md): `auto`, or `HOST:PORT`. Sets `ray.address`.",
    ),
]
Date = Annotated[
    str | None,
    typer.Option(metavar="YYYY-MM-DD", help="Value of `${date}` in the job file; today by default."),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour",
        min=0,
        metavar="PRICE",
        help="Price of the machine per hour, in any currency; the cost of the job is then shown.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text, one object per line.")]


def folder_or_job(target: Path, overrides: list[str] | None, date: str | None = None) -> Path | Job:
    """Load the job if `target` is a job file or a folder with one. Otherwise return `target`, which is a result folder.

    Args:
        target: The path that the user gave.
        overrides: The values of `--set`.
        date: The value of `--date`.

    Raises:
        UsageError: `--set` or `--date` is given with a result folder.
        JobFileError: The job file is invalid.
    """
    from batchinfer.job.file import job_file_in

    target = job_file_in(target)
    if not target.is_dir() and (target.is_file() or target.suffix in (".yaml", ".yml")):
        return load(target, overrides, date)
    given = [name for name, value in (("--set", overrides), ("--date", date)) if value]
    if given:
        they, it = ("work", "them") if len(given) > 1 else ("works", "it")
        raise UsageError(
            f"{' and '.join(given)} {they} only with a job file, but {target} is not one; name the job file, or leave "
            f"{it} out"
        )
    return target


def load(path: Path, overrides: list[str] | None, date: str | None, ray: str | None = None) -> Job:
    """Load a job file, changed by options of the command line.

    Args:
        path: The job file, or its folder.
        overrides: The values of `--set`.
        date: The value of `--date`.
        ray: The value of `--ray`.

    Raises:
        JobFileError: The job file or an option is invalid.
        UsageError: A value of `--set` has no "=".
    """
    from batchinfer.job import load_job
    from batchinfer.job.file import job_file_in

    pairs = pairs_of(overrides) + ([] if ray is None else [("ray.address", ray)])
    return load_job(job_file_in(path), pairs, date)


def pairs_of(overrides: list[str] | None) -> list[tuple[str, str]]:
    """Split each value of `--set` into (key, value). Raises UsageError for a value without "=". Empty for None."""
    pairs = []
    for text in overrides or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {text}: wanted KEY=VALUE, e.g. --set engine.max_num_seqs=64")
        pairs.append((key.strip(), value))
    return pairs
