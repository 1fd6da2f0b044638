"""Helpers of tests of compiled operators: the operators per instruction set, tolerances, threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.tiles import TileWay

DTYPES = (torch.float32, torch.bfloat16)
# One rounding of the stored type: 2^-24 and 2^-8, with room for sums in another order.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 1.6e-2},
}
# Ways to multiply: native, in matrix tiles, by matrix multiply-accumulate
WAYS: tuple[TileWay | None, ...] = (None, "emulated", "emulated_mmla")


@cache
def operators(tiles: TileWay | None = None, codes: bool = False) -> CompiledOperators:
    return CompiledOperators(tiles=tiles, codes=codes)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_goes_through(script: str, *arguments: str) -> None:
    """Run a script that may crash in a separate process, and check that it reaches its end."""
    command = [sys.executable, "-c", script + '\nprint("went through")', *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "went through"), done.stderr
