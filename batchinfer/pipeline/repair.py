"""`batchinfer verify --repair`: runs the job that published a damaged result again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.job import load_job
from batchinfer.pipeline.library import run_verified
from batchinfer.report.progress import Progress
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.made_by import MadeBy, read_made_by


def made_by(results: Path) -> MadeBy | None:
    """Return the command that published a result, or None if the state folder of the result does not record it."""
    return read_made_by(find_state(results))


def next_step(results: Path) -> str:
    """Return a sentence that tells the user how to repair a damaged result."""
    made = made_by(results)
    again = "run its job again" if made is None else f"`{made.command} --verify`"
    how = "" if made is None else f"; `batchinfer verify {results} --repair` does the same"
    return (
        f"next: {again}: it drops what is damaged, publishes the result again from the stored answers, and computes "
        f"missing answers again{how}"
    )


def repair_result(results: Path, progress: Progress, notice: Callable[[str], None]) -> None:
    """Run the job that published a damaged result again, with `--verify`, which replaces damaged files.

    Args:
        results: The folder of the result.
        progress: The progress display.
        notice: Called with lines for the user.

    Raises:
        UsageError: The state does not record which job published the result.
        BatchInferError: The run failed.
    """
    made = made_by(results)
    if made is None:
        raise UsageError(
            f"--repair: the state next to {results} that names its job is gone; run the job that published it: "
            "batchinfer run JOB.YAML --verify"
        )
    job = load_job(made.job_file, made.overrides, made.date)
    run_verified(job, made.limit, progress, notice)
