"""The start and the end of an engine's processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import NoReturn

from batchinfer.core.errors import BatchInferError, OutOfMemory, lacks_memory
from batchinfer.pipeline.workers.messages import EngineResources, Failed

# Ends an engine with an exit status, after all messages to the driver were sent
Leave = Callable[[int], NoReturn]


def leave(status: int) -> NoReturn:
    """End this process at once, without the slow cleanup of torch and CUDA. The system frees all resources.

    Args:
        status: The exit status.
    """
    os._exit(status)


def restrict_process(resources: EngineResources) -> None:
    """Restrict this process to the cores or the GPU of its worker.

    Call it before an import that starts threads or initialises CUDA.

    Args:
        resources: The cores and the GPU.

    Raises:
        OSError: The cores cannot be used.
    """
    if resources.cores:
        os.sched_setaffinity(0, resources.cores)
    if resources.gpu is not None:
        if "CUDA_VISIBLE_DEVICES" not in os.environ:  # otherwise the user's numbers are in CUDA's own order
            os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = resources.gpu


def failure(
    error: BaseException,
    where: str = "the engine",
    remedy: str = "lower engine.kv_memory or engine.max_num_batched_tokens",
) -> Failed:
    """Return the message that tells the driver about an error that ends this process.

    Args:
        error: The error.
        where: What ran out of memory. Only used in the message of an OutOfMemory error.
        remedy: The advice to the user. Only used in the message of an OutOfMemory error.
    """
    detail = traceback.format_exc()
    if isinstance(error, BatchInferError):
        return Failed(error.exit_code, str(error), detail)
    if _is_out_of_memory(error):
        return Failed(OutOfMemory.exit_code, f"out of memory in {where}: {error}; {remedy}", detail)
    return Failed(BatchInferError.exit_code, f"{type(error).__name__}: {error}", detail)


def _is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or lacks_memory(error)
