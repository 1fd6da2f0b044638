"""The target architecture of kernels, and properties of the GPU."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton

# Bytes of shared memory per block on architectures that have less than 8.0 (CUDA programming guide, compute
# capabilities), minus 1 KiB that tiles cannot use
SMALL_MEMORY = dict.fromkeys(("86", "89", "120", "121"), 98 * 1024)


def architecture() -> str:
    """Return the GPU's architecture in Triton's notation, such as "90" or "gfx942"; "" if kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        return ""
    driver = triton.runtime.driver.active
    return _architecture_of(driver, driver.get_current_device())


@lru_cache(maxsize=16)
def _architecture_of(driver: Any, _device: object) -> str:
    # Cached, because each layer has several launches that need it
    return str(driver.get_current_target().arch)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, over which kernels divide their work; 1 for a CPU."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
