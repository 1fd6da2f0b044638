"""The exceptions of batchinfer, with the exit code of each.

    BatchInferError                70  a bug, unless a subclass applies
    ├── UsageError                  2  the command line
    ├── InputCorrupt               65  an input file is damaged, or changed while it was read
    ├── ErrorBudgetExceeded        65  more error rows than `on_error.max_error_rate` allows
    ├── QualityTooLow              65  quantisation changes predictions beyond `engine.quality_limits`
    ├── InputMissing               66  the job file, an input file or a model does not exist
    │   └── TooFewRows             66  the input has no rows, or fewer than `input.min_rows`
    ├── Unavailable                69  the device, the store or a hub cannot be reached
    │   └── CannotSplit            69  a model that cannot be sharded across the requested ranks
    ├── OutOfMemory                71  the device or the host has no memory left
    ├── OutputConflict             73  the result folder contains files that this job did not write
    ├── StorageError               74  disk full or input/output error; the job can be resumed
    │   └── DamagedResult          74  a published file was changed; the job publishes it again
    ├── Locked                     75  another run of this job, or another pull of this model, is running
    ├── Busy                       75  other processes use the cores that are being measured
    ├── StopTimeReached            75  `--stop-at` was reached; the same command continues the job
    ├── SecurityRefusal            77  pickle, remote code, or a path that escapes
    ├── JobFileError               78  the job file is wrong; lists every mistake
    └── Interrupted       129/130/143  SIGHUP, SIGINT or SIGTERM; finished answers are committed

Errors of single rows are not exceptions: they are `RowError` (request.py) and become error rows.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.core.version import __version__


class BatchInferError(Exception):
    """The base class of batchinfer's errors. `str(error)` is a message for the user: what happened and what to do."""

    exit_code = 70
    status = "bug"  # the value of `exit_status` in the run table


class UsageError(BatchInferError):
    """The command line is wrong."""

    exit_code = 2
    status = "usage error"


class InputCorrupt(BatchInferError):
    """An input file is damaged, or changed while it was read. The message contains the file and the position in it."""

    exit_code = 65
    status = "input damaged"


class ErrorBudgetExceeded(BatchInferError):
    """More rows failed than `on_error.max_error_rate` allows."""

    exit_code = 65
    status = "over budget"


class QualityTooLow(BatchInferError):
    """Quantisation changes the model's predictions beyond `engine.quality_limits`. No row was computed."""

    exit_code = 65
    status = "quality too low"


class InputMissing(BatchInferError):
    """A file that the user names does not exist, a glob matches no file, or the hub has no such model."""

    exit_code = 66
    status = "input missing"


class TooFewRows(InputMissing):
    """The input has no rows, or fewer than `input.min_rows` asks for. The published result stays as it is."""

    status = "too few rows"


class Unavailable(BatchInferError):
    """The device or the engine's process is gone or cannot be started, or a model hub cannot be reached."""

    exit_code = 69
    status = "unavailable"


class CannotSplit(Unavailable):
    """The model cannot be sharded as requested. The message contains the reason, or the possible values."""


class OutOfMemory(BatchInferError):
    """Memory is exhausted. The message contains what would make the job fit."""

    exit_code = 71
    status = "out of memory"


class OutputConflict(BatchInferError):
    """The result folder contains files that this job did not write."""

    exit_code = 73
    status = "output conflict"


class StorageError(BatchInferError):
    """Reading or writing a file failed (disk full, I/O error). The same command resumes the job."""

    exit_code = 74
    status = "storage error"


class DamagedResult(StorageError):
    """A file of a published result was changed after publishing. The same command publishes the result again."""

    def __init__(self, message: str, place: str = "", problem: str = "", job: str | None = None) -> None:
        self.place, self.problem, self.job = place, problem, job
        super().__init__(message)


class Locked(BatchInferError):
    """Another run holds the lock of the job's state folder, or another pull holds the lock of the model."""

    exit_code = 75
    status = "locked"


class Busy(BatchInferError):
    """Other processes use too much of the machine for a measurement."""

    exit_code = 75


class StopTimeReached(BatchInferError):
    """The time of `--stop-at` was reached. Finished answers are stored, and the same command continues the job."""

    exit_code = 75
    status = "stopped"


class SecurityRefusal(BatchInferError):
    """A file that could run code, or a path that leaves its folder, is refused."""

    exit_code = 77
    status = "refused"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a job file.

    Args:
        where: The dotted key of the job file, such as "sampling.max_tokens".
        message: One sentence with the wrong value and the possible values.
        line: The line of the job file, from 1. None: unknown.
        hint: Advice for the user, such as the nearest valid key.
    """

    where: str
    message: str
    line: int | None = None
    hint: str | None = None


class JobFileError(BatchInferError):
    """The job file is wrong. `mistakes` contains every mistake that was found."""

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
    """A signal ended the run. Finished answers are committed, and the same command resumes the run."""

    status = "interrupted"

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


TOO_FEW_PROCESSES = (
    "raise the limit on processes and threads: `ulimit -u` for a user, pids.max of a control group (docker: "
    "--pids-limit) for a container"
)
# Messages of a RuntimeError of Python and Arrow when the system returns EAGAIN
_NO_THREAD = ("can't start new thread", "Failed to launch worker thread")


def _lacks_processes(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return any(words in str(error) for words in _NO_THREAD)


# Messages of libraries that raise neither MemoryError nor ENOMEM: torch, C++, the loader of shared libraries
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "failed to map segment",
)


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error shows that the host ran out of memory.

    Args:
        error: The error. The errors that caused it are examined too.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or (isinstance(found, OSError) and found.errno == errno.ENOMEM):
            return True
        if isinstance(found, ImportError | RuntimeError) and any(words in str(found) for words in _NO_MEMORY):
            return True
        found = found.__cause__ or found.__context__
    return False


def classify_error(error: BaseException) -> BatchInferError:
    """Convert any exception to a BatchInferError, which determines the exit code and the message of the process."""
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
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:300]
