"""The file of `--to-openai`: whether a run may write it."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.store.results.output_file import OutputFile, ProtectedFiles


def openai_file(
    job: Job, path: Path | None, state: StateFolder, whole: StateFolder, *, timestamps: bool, replace: bool
) -> OutputFile | None:
    """The file that `--to-openai` names, which may be written as far as can be seen now.

    A trial (`state`) and its job (`whole`) may write the same one. Raises UsageError, OutputConflict, StorageError.
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
        Location.at(path), "--to-openai", ProtectedFiles.of_job(job, state, whole), state, replace=replace
    )
    file.check()
    return file
