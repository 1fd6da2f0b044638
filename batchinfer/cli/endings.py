"""How a command that failed ends: its exit code and its message."""

from __future__ import annotations

import traceback
from dataclasses import asdict
from typing import Any

from batchinfer import __version__
from batchinfer.cli.terminal import say_json, tell_error
from batchinfer.errors import BatchInferError, JobFileError, OutOfMemory, StorageError, UsageError


def explain(error: Exception, as_line: bool) -> int:
    """Print what went wrong, and return the exit code that it means."""
    kind, text = _meaning(error)
    code = error.exit_code if isinstance(error, BatchInferError) else kind.exit_code
    if as_line:
        say_json({"exit_code": code, "exit_status": kind.status, "message": text, **_mistakes(error)})
    tell_error(text)
    return code


def _meaning(error: Exception) -> tuple[type[BatchInferError], str]:
    if isinstance(error, BatchInferError):
        return type(error), str(error)
    if isinstance(error, MemoryError):
        return OutOfMemory, "out of memory; lower engine.kv_memory, or run on a machine with more"
    if isinstance(error, OSError):
        return StorageError, f"{error}; the same command continues once that is put right"
    told = getattr(error, "format_message", None)
    if told is not None:  # a usage error of click's; typer brings its own click, whose class cannot be named
        return UsageError, f"{told()} (see `batchinfer --help`)"
    detail = "".join(traceback.format_exception(error))
    return BatchInferError, f"a bug in batchinfer {__version__}, please report it:\n{detail}"


def _mistakes(error: Exception) -> dict[str, Any]:
    """A job file's mistakes one by one, for editors and other programs."""
    if not isinstance(error, JobFileError):
        return {}
    return {"path": error.path, "mistakes": [asdict(mistake) for mistake in error.mistakes]}
