"""Checks that a run may write the file of `--to-openai`."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.store.results.output_file import OutputFile, ProtectedFiles


def openai_file(
    job: Job,
    path: Path | None,
    state: StateFolder,
    full_state: StateFolder,
    *,
    timestamps: bool,
    replace: bool,
) -> OutputFile | None:
    """Check that a run may write the file of `--to-openai`, and return it. Returns None without that option.

    Args:
        job: The job.
        path: The value of `--to-openai`, or None.
        state: The state folder of this run, which may be a trial.
        full_state: The state folder of the job without `--limit`. A trial and its job may write the same file.
        timestamps: The value of `--openai-timestamps`.
        replace: The value of `--replace`.

    Raises:
        UsageError: `--openai-timestamps` is used alone, or the job's input is not an OpenAI batch file.
        OutputConflict: The file exists and does not belong to the job.
        StorageError: The file cannot be written.
    """
    if path is None:
        if timestamps:
            raise UsageError("--openai-timestamps says what --to-openai FILE writes; give that, too")
        return None
    if not job.requests:
        raise UsageError(
            "--to-openai: the prompt section says where prompts come from, so the job's input is no OpenAI batch file, "
            "which the option needs; leave the option out"
        )
    file = OutputFile(
        Location.at(path),
        "--to-openai",
        ProtectedFiles.of_job(job, state, full_state),
        state,
        replace=replace,
    )
    file.check()
    return file
