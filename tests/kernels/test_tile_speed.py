"""How long products take in the CPU's matrix tiles and in vectors, by number of rows: from which on tiles pay."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.tiles import tile_grant
from tests.kernels.cpu_kit import operators, threads_of

ROWS = (1, 2, 3, 6, 8, 12, 16, 17, 32, 33, 64, 128, 1024)
SHAPES = ((576, 960), (576, 3072), (1536, 576))
PASSES = 3
SECONDS = 0.2  # of each measurement

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not tile_grant().given, reason=tile_grant().refusal or "this CPU has no matrix tiles that are known"
    ),
]


def best_us(call: Callable[[], object]) -> float:
    """Of as many calls as fit."""
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def product(
    compiled: CompiledOperators, rows: int, shape: tuple[int, int], int8: bool
) -> Callable[[], object]:
    x, weight = torch.randn(rows, shape[0]).bfloat16(), torch.randn(shape[1], shape[0]).bfloat16()
    packed = (
        compiled.pack_codes(*quantize_weight(weight), None) if int8 else compiled.pack_linear(weight, None)
    )
    return lambda: compiled.linear(x, packed)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_faster_with_many_rows(shape, int8):
    """On a machine that does nothing else; prints microseconds, the best of three turns each."""
    with threads_of(2):
        for rows in ROWS:
            calls = [product(operators(way), rows, shape, int8) for way in ("none", None)]
            turns = [[best_us(call) for call in calls] for _ in range(PASSES)]
            vectors, tiles = (min(turn[at] for turn in turns) for at in range(2))
            rate = 2 * rows * shape[0] * shape[1] / tiles / 1e3
            what = f"{'int8' if int8 else 'bfloat16'}, {shape[0]} -> {shape[1]}, {rows} rows"
            print(f"{what}: vectors {vectors:.1f}, tiles {tiles:.1f} us ({rate:.0f} G/s)")
            assert rows < 64 or tiles < vectors, "tiles are to be chosen by this"
