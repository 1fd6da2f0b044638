"""The command that published a result. It is stored in the state folder, and publishes a damaged result again."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from batchinfer.filesystem.durable import write_json
from batchinfer.filesystem.json_files import read_json
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job


@dataclass(frozen=True, slots=True)
class MadeBy:
    """A `batchinfer run` command that published a result.

    Attributes:
        job_file: The path of the job file.
        overrides: The keys and values of `--set`.
        date: The date of the run, if it was given.
        limit: The number of rows of a trial, or None for all rows.
    """

    job_file: str
    overrides: tuple[tuple[str, str], ...]
    date: str | None
    limit: int | None

    @classmethod
    def of(cls, job: Job, limit: int | None) -> MadeBy:
        """Return the `batchinfer run` command that runs a job.

        Args:
            job: The job.
            limit: The number of rows of a trial. None: all rows.
        """
        return cls(str(job.source), job.overrides, job.date, limit)

    @property
    def command(self) -> str:
        """Return the command line, quoted for a shell."""
        sets = [word for key, value in self.overrides for word in ("--set", f"{key}={value}")]
        date = [] if self.date is None else ["--date", self.date]
        limit = [] if self.limit is None else ["--limit", str(self.limit)]
        return shlex.join(["batchinfer", "run", self.job_file, *sets, *date, *limit])


def read_made_by(state: StateFolder) -> MadeBy | None:
    """Return the recorded command that published the result, or None if it is missing or invalid."""
    match read_json(state.made_by):
        case {"job_file": str(file), "overrides": list(pairs), "date": str() | None as date, "limit": limit}:
            known = isinstance(limit, int | None) and all(_is_pair(pair) for pair in pairs)
            overrides = tuple((key, value) for key, value in pairs) if known else ()
            return MadeBy(file, overrides, date, limit) if known else None
    return None


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)


def note_made_by(state: StateFolder, made_by: MadeBy) -> None:
    """Record in the state folder which `batchinfer run` command publishes the result.

    The caller must hold the lock of the result. Raises StorageError.
    """
    if read_made_by(state) != made_by:
        write_json(
            state.made_by, asdict(made_by) | {"overrides": [list(o) for o in made_by.overrides]}, state.ops
        )
