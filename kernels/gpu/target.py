"""What kernels are compiled for and run on."""

from __future__ import annotations

from functools import cache

import torch
import triton


def architecture() -> str:
    """As Triton names its target: "80", "90", "gfx942"; "" in the interpreter, which has none."""
    if triton.knobs.runtime.interpret:
        return ""
    return str(triton.runtime.driver.active.get_current_target().arch)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors; 1 where there is no GPU, so that what is interpreted is split least."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
