"""How the processes of an engine begin and end."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import NoReturn

from batchinfer.core.errors import BatchInferError, OutOfMemory, lacks_memory
from batchinfer.pipeline.workers.messages import EnginePlace, Failed

Leave = Callable[
    [int], NoReturn
]  # ends an engine with an exit status, after the parent was sent all messages


def leave(status: int) -> NoReturn:
    """End this process at once. Torch and CUDA would take their time to tear down what the system takes back anyway."""
    os._exit(status)


def settle(place: EnginePlace) -> None:
    """Keep to the place, before anything is imported that starts threads or asks for GPUs. Raises OSError."""
    if place.cores:
        os.sched_setaffinity(0, place.cores)
    if place.gpu is not None:
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # else its numbers are in CUDA's own order
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu


def failure(
    error: BaseException,
    where: str = "the engine",
    remedy: str = "lower engine.kv_memory or engine.max_num_batched_tokens",
) -> Failed:
    """Return what the parent hears of the error that ends the process; of memory that ran out it hears `where`, and
    the `remedy`."""
    detail = traceback.format_exc()
    if isinstance(error, BatchInferError):
        return Failed(error.exit_code, str(error), detail)
    if _is_out_of_memory(error):
        return Failed(OutOfMemory.exit_code, f"out of memory in {where}: {error}; {remedy}", detail)
    return Failed(BatchInferError.exit_code, f"{type(error).__name__}: {error}", detail)


def _is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or lacks_memory(error)
