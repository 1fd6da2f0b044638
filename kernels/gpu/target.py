"""The target that kernels are compiled for, and the GPU that they run on."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton

# Bytes of shared memory that a block may have where it is less than on 8.0 (CUDA programming guide, compute
# capabilities), without 1 KiB that no tile may have
SMALL_MEMORY = dict.fromkeys(("86", "89", "120", "121"), 98 * 1024)


def architecture() -> str:
    """Return the target as Triton names it: "80", "90", "gfx942"; "" in the interpreter, which has none."""
    if triton.knobs.runtime.interpret:
        return ""
    driver = triton.runtime.driver.active
    return _architecture_of(driver, driver.get_current_device())


@lru_cache(maxsize=16)
def _architecture_of(driver: Any, _device: object) -> str:
    """Asked once a device: several launches a layer want to know."""
    return str(driver.get_current_target().arch)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 where there is no GPU, so that interpreted kernels are split least."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
