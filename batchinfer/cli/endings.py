"""Maps errors of a command to an exit code and a message."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from batchinfer.cli.terminal import say_json, tell_error
from batchinfer.core.errors import BatchInferError, JobFileError, UsageError, classify_error

# Options of other programs that users may expect, and what to use instead
_INSTEAD = {"--dry-run": "`batchinfer plan JOB.YAML` says what a run would do, without running it"}


def explain(error: Exception, as_line: bool) -> int:
    """Print the error that ended a command, and return the exit code of the command.

    Args:
        error: The error.
        as_line: True to print the error as a line of JSON, too.
    """
    meant = _meant(error)
    code, text = meant.exit_code, str(meant)
    if as_line:
        say_json({"exit_code": code, "exit_status": meant.status, "message": text, **_mistakes(error)})
    tell_error(text)
    return code


def _meant(error: Exception) -> BatchInferError:
    told = getattr(error, "format_message", None)
    # A usage error of click; typer bundles its own click, whose class cannot be imported
    if told is not None:
        instead = _INSTEAD.get(getattr(error, "option_name", ""), "see `batchinfer --help`")
        return UsageError(f"{told()} ({instead})")
    return classify_error(error)


def _mistakes(error: Exception) -> dict[str, Any]:
    if not isinstance(error, JobFileError):
        return {}
    return {"path": error.path, "mistakes": [asdict(mistake) for mistake in error.mistakes]}
