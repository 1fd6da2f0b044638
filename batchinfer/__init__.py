"""Offline batch inference: a table of prompts in, a Parquet table of answers out."""

from typing import TYPE_CHECKING, Any

from batchinfer.core.version import __version__

__all__ = ["RunResult", "__version__", "run"]

if TYPE_CHECKING:
    from batchinfer.pipeline.library import run
    from batchinfer.pipeline.result import RunResult


def __getattr__(name: str) -> Any:
    """`run` and `RunResult`, imported when they are first used: importing the package alone stays cheap."""
    if name == "run":
        from batchinfer.machine.limits import check_limits

        check_limits()  # before libraries are imported that fail in their own ways where memory is limited
        from batchinfer.pipeline.library import run

        return run
    if name == "RunResult":
        from batchinfer.pipeline.result import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
