"""The root of a job's dated results: `output.path` without its date.

    results/tickets/${date}     results/tickets
    results/tickets-${date}     results/tickets
    results/${date}/tickets     results/tickets
    ${date}                     the job's name

State and report are stored next to this root, so every run finds the answers of earlier days.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from batchinfer.job.file import absolute
from batchinfer.job.variables import HOLE

_AROUND = "-_. "  # separators between a date and the rest of a name
_NAME_LENGTH = 60  # maximum characters of a folder named after a job
_TRIAL = "-first-"


def trial_results(root: Path, limit: int) -> Path:
    """Return the result folder of a trial: a run of only the first `limit` rows of a job.

    Args:
        root: The result folder of the job, without its date.
        limit: The number of rows, which is a part of the name.
    """
    return root.with_name(f"{root.name}{_TRIAL}{limit}")


def root_of_trial(results: Path) -> Path | None:
    """Return the result folder, without its date, of the job whose first rows a trial has run.

    Args:
        results: The result folder of the trial.

    Returns:
        None if `results` is not the folder of a trial.
    """
    found = re.fullmatch(rf"(.+){_TRIAL}\d+", results.name)
    return results.with_name(found[1]) if found else None


def results_root(text: str, folder: Path, job: str) -> Path:
    """Return the result folder of a job without its ${date}, for example "answers" for "answers/${date}".

    Args:
        text: The `output.path`, in which the character HOLE replaces each ${date}.
        folder: The folder that relative paths start from.
        job: The name of the job. It becomes the folder's name if nothing of the path is left.
    """
    parts = [rest for part in PurePath(os.path.normpath(text)).parts if (rest := _closed(part))]
    if all(part in ("..", os.sep, os.sep * 2) for part in parts):
        parts.append(folder_name(job))
    return Path(absolute(folder, os.path.join(*parts)))


def _closed(part: str) -> str:
    if HOLE not in part:
        return part
    first, *between, last = part.split(HOLE)
    pieces = [first.rstrip(_AROUND), *(piece.strip(_AROUND) for piece in between), last.lstrip(_AROUND)]
    return "-".join(filter(None, pieces))


def folder_name(job: str) -> str:
    """Return a folder name for a job: its name with unusual characters replaced, at most 60 characters."""
    return re.sub(r"[^\w.-]+", "-", job)[:_NAME_LENGTH].strip("-.") or "job"
