"""Sets up an engine's process before loading: device, threads, precision of matrix products."""

from __future__ import annotations

import logging

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.machine.cpus import usable_cpus
from batchinfer_kernels.cpu.memory import keep_freed_memory

_log = logging.getLogger(__name__)


def set_up_process(config: LoadConfig) -> tuple[torch.device, int]:
    """Set up torch in this process before a model is loaded: device, threads and precision of matrix products.

    Args:
        config: The settings for loading the model.

    Returns:
        The device and the number of CPU threads.

    Raises:
        Unavailable: A GPU is configured, but there is no CUDA device.
    """
    device, threads = _device(config), _set_threads(config)
    if config.device == "cuda":
        keep_partial_sums()
    return device, threads


def _device(config: LoadConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "engine.device is cuda, but torch finds no CUDA device; use device: cpu, or check the driver"
        )
    return torch.device(config.device)


def keep_partial_sums() -> None:
    """Make cuBLAS add partial sums of matrix products in full precision, in this process.

    Otherwise, the result of a row could depend on the number of rows in the product.
    """
    # The number of rows decides which products are computed in parts along the inner dimension
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _set_threads(config: LoadConfig) -> int:
    if config.device == "cpu":
        keep_freed_memory()
    usable = usable_cpus()
    if config.threads is not None and config.threads > usable:
        _log.warning(
            "engine.threads is %d, but this process may use only %d cores; it uses %d threads",
            config.threads,
            usable,
            usable,
        )
    torch.set_num_threads(min(config.threads or usable, usable))
    return torch.get_num_threads()
