"""Offline batch inference: a table of prompts in, a Parquet table of answers out."""

from typing import TYPE_CHECKING, Any

from batchinfer.core.version import __version__

__all__ = ["RunResult", "__version__", "run"]

if TYPE_CHECKING:
    from batchinfer.pipeline.library import run
    from batchinfer.pipeline.result import RunResult


def __getattr__(name: str) -> Any:
    """Import `run` and `RunResult` on first use, which keeps importing the package cheap."""
    if name == "run":
        from batchinfer.machine.limits import check_limits

        check_limits()  # before importing libraries that fail unclearly if memory is limited
        from batchinfer.pipeline.library import run

        return run
    if name == "RunResult":
        from batchinfer.pipeline.result import RunResult

        return RunResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
