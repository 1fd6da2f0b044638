"""How a command that failed ends: its exit code and its message."""

from __future__ import annotations

import json
import signal
import traceback

import typer

from batchinfer import __version__
from batchinfer.errors import BatchInferError, StorageError, UsageError


def explain(error: Exception, as_line: bool) -> int:
    """Print what went wrong, and the exit code that it means."""
    code, text = _meaning(error)
    if as_line:
        typer.echo(json.dumps({"exit_code": code, "error": type(error).__name__, "message": text}))
    typer.echo(f"batchinfer: {text}", err=True)
    return code


def _meaning(error: Exception) -> tuple[int, str]:
    if isinstance(error, BatchInferError):
        return error.exit_code, str(error)
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE, "the reader of the output has gone"
    if isinstance(error, MemoryError):
        return 71, "out of memory; lower engine.kv_memory, or run on a machine with more"
    if isinstance(error, OSError):
        return StorageError.exit_code, f"{error}; the same command continues once that is mended"
    told = getattr(error, "format_message", None)
    if told is not None:  # a usage error of click's; typer brings its own click, whose class cannot be named
        return UsageError.exit_code, f"{told()} (see `batchinfer --help`)"
    detail = "".join(traceback.format_exception(error))
    return BatchInferError.exit_code, f"a bug in batchinfer {__version__}, please report it:\n{detail}"
