"""`batchinfer.run` for notebooks and schedulers, and the functions with which the command line runs jobs."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from batchinfer.core.errors import UsageError
from batchinfer.job import Job, load_job
from batchinfer.job.deadline import TIME_FORMATS, StopTime
from batchinfer.job.file import job_file_in
from batchinfer.machine.limits import check_limits
from batchinfer.pipeline import options as run_options
from batchinfer.pipeline import run as pipeline
from batchinfer.pipeline.options import wrong
from batchinfer.pipeline.result import RunResult
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress

SettingValue = str | int | float | bool | None | list[str] | Path
_OFFLINE = "HF_HUB_OFFLINE"


def run(
    job: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, SettingValue] | None = None,
    *,
    date: str | None = None,
    limit: int | None = None,
    replace: bool = False,
    retry_errors: bool = False,
    verify: bool = False,
    to_openai: str | os.PathLike[str] | None = None,
    openai_timestamps: bool = False,
    price_per_hour: float | None = None,
    stop_at: str | None = None,
    progress: TextIO | None = None,
) -> RunResult:
    """Run or continue a job, like the command `batchinfer run`.

    Args:
        job: A job file, a folder that contains job.yaml, or a mapping with the sections of a job file. Relative paths
            in a mapping start from the working directory.
        overrides: Keys of the job file and their values, for example {"engine.max_num_seqs": 64}.
        date: `--date`, YYYY-MM-DD.
        limit: `--limit`: run a trial of the first rows.
        replace: `--replace`.
        retry_errors: `--retry-errors`.
        verify: `--verify`.
        to_openai: `--to-openai`, a path.
        openai_timestamps: `--openai-timestamps`.
        price_per_hour: `--price-per-hour`, in any currency.
        stop_at: `--stop-at`.
        progress: A stream for progress and notices, for example sys.stderr. None prints nothing.

    Returns:
        The published result. Its exit code is 65 if more rows are errors than the job allows.

    Raises:
        BatchInferError: The run failed. The subclasses in `batchinfer.core.errors` have the command's `exit_code`.
    """
    pairs = _pairs(overrides)
    options = run_options.RunOptions(
        limit=limit,
        replace=replace,
        retry_errors=retry_errors,
        verify=verify,
        to_openai=None if to_openai is None else _path("to_openai", to_openai),
        openai_timestamps=openai_timestamps,
        price_per_hour=price_per_hour,
        stop_at=None if stop_at is None else _stop_time(stop_at),
    )
    if date is not None and not isinstance(date, str):
        raise wrong("date", date, "a text, YYYY-MM-DD")
    if progress is not None and not callable(getattr(progress, "write", None)):
        raise wrong("progress", progress, "a stream of text such as sys.stderr, or None")
    loaded = load_job(job if isinstance(job, Mapping) else job_file_in(_path("job", job)), pairs, date)
    shown = Progress(progress, job=loaded.name, quiet=progress is None)
    return run_loaded(loaded, options, shown, _silent if progress is None else shown.note)


def run_loaded(
    job: Job, options: run_options.RunOptions, progress: Progress, notice: Callable[[str], None]
) -> RunResult:
    """Run a job whose job file was loaded, and return its published result.

    In the main thread, signals stop the run at a safe point.

    Args:
        job: The job.
        options: The options of the run.
        progress: The progress display.
        notice: Called with lines for the user.

    Raises:
        BatchInferError: The run failed.
    """
    check_limits()
    with job.located(), _interrupts() as interrupts, _offline(), progress:
        outcome = pipeline.run_job(job, options, progress, interrupts, notice)
    row = MappingProxyType(outcome.row)
    return RunResult(
        results=Path(row["output"]),
        exit_code=outcome.exit_code,
        status=row["exit_status"],
        message=outcome.error,
        report=outcome.report,
        rows=row["rows"],
        rows_ok=row["rows_ok"],
        rows_error=row["rows_error"],
        error_codes=MappingProxyType(dict(row["error_codes"] or {})),
        computed=row["computed_requests"],
        reused=row["reused_requests"],
        row=row,
    )


def run_verified(job: Job, limit: int | None, progress: Progress, notice: Callable[[str], None]) -> RunResult:
    """Run a job with `--verify`: files of earlier runs are checked, and answers in damaged files are computed again.

    Args:
        job: The job.
        limit: Number of first rows to run as a trial. None: all rows.
        progress: The progress display.
        notice: Called with lines for the user.
    """
    return run_loaded(job, run_options.RunOptions(limit, verify=True), progress, notice)


@contextlib.contextmanager
def _interrupts() -> Iterator[Interrupts]:
    # Python allows signal handlers only in the main thread
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    with interrupts.installed():
        yield interrupts


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    # Hugging Face libraries of this process and its child processes must not download files
    before = os.environ.get(_OFFLINE)
    os.environ[_OFFLINE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OFFLINE]
        else:
            os.environ[_OFFLINE] = before


def _pairs(overrides: Mapping[str, SettingValue] | None) -> list[tuple[str, str]]:
    if overrides is None:
        return []
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise wrong(
            "overrides", overrides, 'a mapping of keys to values, such as {"engine.max_num_seqs": 64}'
        )
    return [(key, _yaml(key, value)) for key, value in overrides.items()]


def _yaml(key: str, value: SettingValue) -> str:
    try:
        return json.dumps(os.fspath(value) if isinstance(value, os.PathLike) else value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UsageError(
            f"overrides (--set {key}): found {repr(value)[:80]}; it must be a number, a text, a path, True, False, "
            "None, or a list of these"
        ) from None


def _stop_time(text: str) -> StopTime:
    if not isinstance(text, str):
        raise wrong("stop_at (--stop-at)", text, TIME_FORMATS)
    return StopTime.of(text, datetime.now().astimezone())


def _path(name: str, value: str | os.PathLike[str]) -> Path:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise wrong(name, value, "a path, as a text or a pathlib.Path")
    return Path(path)


def _silent(_: str) -> None:
    """Drop a notice."""
