"""Messages of a run with `--stop-at`: the stop time, the rows left, and the command that continues."""

from __future__ import annotations

import shlex
from datetime import datetime

from batchinfer.core.wording import count, rough_duration
from batchinfer.job import Job
from batchinfer.job.deadline import StopTime
from batchinfer.pipeline.options import RunOptions
from batchinfer.report.progress import Progress
from batchinfer.store.results.made_by import MadeBy


def stop_line(stop: StopTime, now: datetime) -> str:
    """Return the notice that a run will stop early: at which time, and how long from now."""
    left_s = (stop.at - now).total_seconds()
    return f"the run stops at {stop.at.astimezone():%Y-%m-%d %H:%M}, in {rough_duration(left_s)} (--stop-at)"


def stopped_early_text(job: Job, options: RunOptions) -> str:
    """Return the message of a run whose stop time came before its engines ran, or "" if no stop time is set.

    Args:
        job: The job.
        options: The options of the run.
    """
    if options.stop_at is None:
        return ""
    return (
        f"{stop_reached_text(options.stop_at)} before a row was computed; the rows that are left were not counted yet. "
        f"{continue_text(job, options)}"
    )


def continue_text(job: Job, options: RunOptions) -> str:
    """Return a sentence that tells the user how to continue a stopped run: with which command or call.

    Args:
        job: The job.
        options: The options of the stopped run, which the command repeats.
    """
    if not job.source.is_file():
        return "The same call continues the job."
    words = [MadeBy.of(job, options.limit).command]
    words += [option for option, given in _switches(options) if given]
    if options.to_openai is not None:
        words.append(f"--to-openai {shlex.quote(str(options.to_openai))}")
    if options.stop_at is not None and options.stop_at.recurs:
        words.append(f"--stop-at {options.stop_at.text}")
    return f"To continue: {' '.join(words)}"


def _switches(options: RunOptions) -> list[tuple[str, bool]]:
    return [
        ("--replace", options.replace),
        ("--retry-errors", options.retry_errors),
        ("--verify", options.verify),
        ("--openai-timestamps", options.openai_timestamps),
    ]


def stop_reached_text(stop: StopTime) -> str:
    """Return the beginning of the message of a run that ends at its stop time."""
    return f"stopped at {stop.at.astimezone():%H:%M} (--stop-at)"


def rows_left_text(progress: Progress, rows: int | None, forecast_s: float | None) -> str:
    """Return a phrase that says how many rows of a stopped run are left, and how long they will take.

    Args:
        progress: The progress of the run.
        rows: Number of rows without an answer before the engines ran. None if the input was not read to its end.
        forecast_s: Forecast engine time for these rows in seconds, or None.
    """
    left = rows if progress.rows_left is None else progress.rows_left
    if left is None:
        return "the rows that are left were not counted yet"
    of = f" of {count(rows)}" if rows is not None and left < rows else ""
    least = "" if progress.knows_all_rows else "at least "
    takes = f"{least}{count(left)}{of} {'row is' if left == 1 else 'rows are'} left"
    left_s = progress.left_of_known_s()
    if left_s is None and forecast_s is not None:
        left_s = forecast_s * (1 - (progress.share or 0.0))
    if left_s is None:
        return f"{takes}, and it is not known yet how long they take"
    return f"{takes}, which take about {rough_duration(left_s)}"
