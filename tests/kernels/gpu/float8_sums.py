"""Measures how exactly a GPU adds products of float8."""

from __future__ import annotations

from functools import cache

import torch
import triton

# The tensor cores of compute capability 9.0 keep some 14 bits of such a sum (DeepSeek-AI, 2024, "DeepSeek-V3 technical
# report", 3.3.2), which goes to float32 every 128 inputs: a unit in the last place for each of four instructions, of
# sums that can be a few times as large as the result
SHORT = 2e-3


@cache
def float8_rounding() -> float:
    """Return the additional error of float8 sums as a share of the largest result, or 0 if sums are in
    float32."""
    if triton.knobs.runtime.interpret or torch.cuda.get_device_capability() != (9, 0):
        return 0.0
    return SHORT
