"""Settles an engine's process before it loads: its device, its threads, how the vendor's products add up."""

from __future__ import annotations

import logging

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.machine.cpus import usable_cpus
from batchinfer_kernels.cpu.memory import keep_freed_memory

_log = logging.getLogger(__name__)


def settled(config: LoadConfig) -> tuple[torch.device, int]:
    """Set this process up for the job's device; the device and the number of threads. Raises Unavailable."""
    device, threads = _device(config), _set_threads(config)
    if config.device == "cuda":
        keep_partial_sums()
    return device, threads


def _device(config: LoadConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Unavailable(
            "engine.device is cuda, and torch finds no CUDA device; use device: cpu, or check the driver"
        )
    return torch.device(config.device)


def keep_partial_sums() -> None:
    """Tell torch, for this process, not to round partial sums of the vendor's matrix products to 16 bits: which ones
    are split along the inner dimension depends on the number of rows."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _set_threads(config: LoadConfig) -> int:
    """One thread for each core that this process may use, or fewer: more would only wait for one another."""
    if config.device == "cpu":
        keep_freed_memory()
    usable = usable_cpus()
    if config.threads is not None and config.threads > usable:
        _log.warning(
            "engine.threads is %d, but this process may use only %d cores; that many threads are used",
            config.threads,
            usable,
        )
    torch.set_num_threads(min(config.threads or usable, usable))
    return torch.get_num_threads()
