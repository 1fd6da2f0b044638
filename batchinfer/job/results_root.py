"""The root of a job's dated results: `output.path` without its date.

    results/tickets/${date}     results/tickets
    results/tickets-${date}     results/tickets
    results/${date}/tickets     results/tickets
    ${date}                     the job's name

State and report lie next to this root, so that every night finds the answers of the nights before.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath

from batchinfer.job.file import absolute
from batchinfer.job.variables import HOLE

_AROUND = "-_. "  # what joins a date to the rest of a name
_NAME_LENGTH = 60  # characters of a job's name that a folder is called after
_TRIAL = "-first-"


def trial_results(root: Path, limit: int) -> Path:
    """The result folder of a trial over the first `limit` rows."""
    return root.with_name(f"{root.name}{_TRIAL}{limit}")


def root_of_trial(results: Path) -> Path | None:
    """Return the root for which `trial_results` gave that folder; None for a name that it never gives."""
    found = re.fullmatch(rf"(.+){_TRIAL}\d+", results.name)
    return results.with_name(found[1]) if found else None


def results_root(text: str, folder: Path, job: str) -> Path:
    """The root of an `output.path` in which every ${date} was replaced by HOLE; relative paths start from `folder`."""
    parts = [rest for part in PurePath(os.path.normpath(text)).parts if (rest := _closed(part))]
    if all(part in ("..", os.sep, os.sep * 2) for part in parts):
        parts.append(folder_name(job))
    return Path(absolute(folder, os.path.join(*parts)))


def _closed(part: str) -> str:
    """One component without its holes and what joined them to the rest."""
    if HOLE not in part:
        return part
    first, *between, last = part.split(HOLE)
    pieces = [first.rstrip(_AROUND), *(piece.strip(_AROUND) for piece in between), last.lstrip(_AROUND)]
    return "-".join(filter(None, pieces))


def folder_name(job: str) -> str:
    """A job's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", job)[:_NAME_LENGTH].strip("-.") or "job"
