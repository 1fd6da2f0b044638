"""Everything that batchinfer raises on purpose, and the exit code and the status word that each becomes.

    BatchInferError                70  a bug, when nothing more specific is known
    ├── UsageError                  2  the command line
    ├── InputCorrupt               65  an input file is damaged, or changed while it was read
    ├── ErrorBudgetExceeded        65  more error rows than `on_error.max_error_rate` allows
    ├── InputMissing               66  the job file or an input file is missing, or a hub has no such model
    │   └── TooFewRows             66  the input has no rows, or fewer than `input.min_rows`
    ├── Unavailable                69  the device, the store or a hub cannot be reached
    │   └── CannotSplit            69  a model that cannot be divided among so many ranks
    ├── OutOfMemory                71  the device or the host has no memory left
    ├── OutputConflict             73  the result folder belongs to somebody else
    ├── StorageError               74  disk full or input/output error; the job can be resumed
    │   └── DamagedResult          74  a published file is not as it was written; the job publishes it again
    ├── Locked                     75  another run of this job, or pull of this model, is running
    ├── Busy                       75  other processes use the cores that were to be measured
    ├── StopTimeReached            75  `--stop-at` was reached; the same command continues the job
    ├── SecurityRefusal            77  pickle, remote code, or a path that escapes
    ├── JobFileError               78  the job file, with every mistake listed
    └── Interrupted       129/130/143  SIGHUP, SIGINT or SIGTERM; what was done is committed

What goes wrong with a single row is no exception: it is a `RowError` (request.py) that becomes an error row.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.core.version import __version__


class BatchInferError(Exception):
    """The root: `str(error)` says what happened and what would be right."""

    exit_code = 70
    status = "bug"  # the word for it in the run table's `exit_status`


class UsageError(BatchInferError):
    """The command line asks for something that cannot be."""

    exit_code = 2
    status = "usage error"


class InputCorrupt(BatchInferError):
    """An input file is damaged or changed meanwhile; names the file and the place."""

    exit_code = 65
    status = "input damaged"


class ErrorBudgetExceeded(BatchInferError):
    """More rows failed than `on_error.max_error_rate` allows."""

    exit_code = 65
    status = "over budget"


class InputMissing(BatchInferError):
    """The job file or an input file does not exist, a glob matches no file, or a hub has no such model."""

    exit_code = 66
    status = "input missing"


class TooFewRows(InputMissing):
    """The input has no rows, or fewer than `input.min_rows` asks for. The published result stays as it is."""

    status = "too few rows"


class Unavailable(BatchInferError):
    """The device, or the engine's process, is gone or cannot be started; or a hub cannot be reached."""

    exit_code = 69
    status = "unavailable"


class CannotSplit(Unavailable):
    """A model that cannot be divided among ranks as it was asked for; says what can be."""


class OutOfMemory(BatchInferError):
    """No memory is left; names what would make the job fit."""

    exit_code = 71
    status = "out of memory"


class OutputConflict(BatchInferError):
    """The result folder holds something that this job did not write."""

    exit_code = 73
    status = "output conflict"


class StorageError(BatchInferError):
    """Reading or writing failed below us (disk full, I/O error). The same command resumes the job."""

    exit_code = 74
    status = "storage error"


class DamagedResult(StorageError):
    """A file of a published result is not as it was written. The same command publishes the result again."""

    def __init__(self, message: str, place: str = "", problem: str = "", job: str | None = None) -> None:
        self.place, self.problem = place, problem  # which file, and what is wrong with it
        self.job = job  # the name that a damaged manifest gives the job, where it can be read
        super().__init__(message)


class Locked(BatchInferError):
    """Another run holds the lock of this job's state folder, or another pull that of the model."""

    exit_code = 75
    status = "locked"


class Busy(BatchInferError):
    """Other processes use the machine so much that a measurement would be wrong."""

    exit_code = 75


class StopTimeReached(BatchInferError):
    """The time of `--stop-at` was reached. Finished answers are stored, and the same command continues the job."""

    exit_code = 75
    status = "stopped"


class SecurityRefusal(BatchInferError):
    """Something that could run code or leave its folder: refused."""

    exit_code = 77
    status = "refused"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a job file: where, what was found, and what would be right."""

    where: str  # dotted key, e.g. "sampling.max_tokens"
    message: str  # what was found and what would be right, in one sentence
    line: int | None = None  # 1-based line of the job file, where there is one
    hint: str | None = None  # the next step, e.g. the nearest known key


class JobFileError(BatchInferError):
    """The job file is wrong; `mistakes` holds all that was found, not only the first."""

    exit_code = 78
    status = "wrong job"

    def __init__(self, path: str, mistakes: Sequence[Mistake]) -> None:
        self.path = path
        self.mistakes = tuple(mistakes)
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.mistakes)
        head = f"{self.path}: {count} mistake{'' if count == 1 else 's'}"
        return "\n".join([head, *(f"  {self._one(m)}" for m in self.mistakes)])

    def _one(self, mistake: Mistake) -> str:
        place = f"line {mistake.line}: " if mistake.line is not None else ""
        key = f"{mistake.where}: " if mistake.where else ""
        hint = f" ({mistake.hint})" if mistake.hint else ""
        return f"{place}{key}{mistake.message}{hint}"


class Interrupted(BatchInferError):
    """A signal ended the run; what was finished is committed and the same command resumes it."""

    status = "interrupted"

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


TOO_FEW_PROCESSES = (
    "raise the limit on processes and threads: `ulimit -u` for a user, pids.max of a control group (docker: "
    "--pids-limit) for a container"
)
# What Python and Arrow say in a RuntimeError of their own where the system says EAGAIN.
_NO_THREAD = ("can't start new thread", "Failed to launch worker thread")


def _lacks_processes(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return any(words in str(error) for words in _NO_THREAD)


# The words of libraries that raise neither MemoryError nor ENOMEM: torch, C++, the loader of shared libraries
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "failed to map segment",
)


def lacks_memory(error: BaseException) -> bool:
    """Return True if the host ran out of memory: shown by the error, or by an error that led to it."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno == errno.ENOMEM):
            return True
        if isinstance(found, ImportError | RuntimeError) and any(words in str(found) for words in _NO_MEMORY):
            return True
        found = found.__cause__ or found.__context__
    return False


def known(error: BaseException) -> BatchInferError:
    """The error of this tree that `error` is or amounts to: what the process ends with, and what its report says."""
    if isinstance(error, BatchInferError):
        return error
    if lacks_memory(error):
        return OutOfMemory(
            f"out of memory ({_first_line(error)}); lower engine.kv_memory, raise the limit of the process "
            "(`ulimit -v`, `ulimit -d`) if it has one, or run on a machine with more memory"
        )
    if _lacks_processes(error):
        return Unavailable(f"no further process or thread may be started ({error}); {TOO_FEW_PROCESSES}")
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room on that disk" if full else "correct that"
        return StorageError(
            f"{error}; {remedy}, then run the same command again: it continues where it stopped"
        )
    detail = "".join(traceback.format_exception(error))
    return BatchInferError(f"a bug in batchinfer {__version__}, please report it:\n{detail}")


def _first_line(error: BaseException) -> str:
    """Return what kind of error it is, and how its text begins."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:300]
