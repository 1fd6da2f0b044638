"""Operators compiled for a CPU with matrix tiles have the bits of those in C.

Without such a CPU, each tile instruction traps and is executed in software (tile_traps.c). This tests the compiler's
instructions, tiles, addresses and order.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from batchinfer_kernels import tiles
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.kernels.c_units import compiled_unit
from tests.kernels.cpu_kit import operators, threads_of
from tests.kernels.test_cpu_experts import packed_experts, starts_of
from tests.kernels.test_cpu_linear import GATES, packed_of

LINUX = sys.platform == "linux" and platform.machine() == "x86_64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LINUX, reason="instructions of x86-64, caught on Linux"),
]
TARGET = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
KINDS = ("configure", "release", "zero", "load", "store", "bfloat16", "int8")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> CompiledOperators:
    """Operators built for tiles, for any CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *TARGET))
        found = CompiledOperators(tiles="granted")
    assert found.has_tiles, "the compiler is too old to know the instructions"
    return found


@pytest.fixture(scope="module")
def traps(tmp_path_factory) -> ctypes.CDLL:
    library = ctypes.CDLL(
        str(compiled_unit("tile_traps.c", tmp_path_factory.mktemp("traps"), "-DEMULATED_TILES"))
    )
    library.executed_of.restype = ctypes.c_int64
    return library


@contextmanager
def executed(traps: ctypes.CDLL) -> Iterator[dict[str, int]]:
    """Yield the number of instructions by kind that were executed in software; empty on a CPU with tiles."""
    counts: dict[str, int] = {}
    if tiles.tile_grant().given:
        yield counts
        return
    traps.catch_tiles()
    try:
        yield counts
    finally:
        traps.let_tiles_go()
    counts.update({kind: traps.executed_of(ctypes.c_int64(at)) for at, kind in enumerate(KINDS)})


@pytest.mark.parametrize("inputs", [1, 31, 64, 97])
@pytest.mark.parametrize("rows", [1, 3, 17, 33])
@pytest.mark.parametrize("int8", [False, True])
def test_linear_layers_have_the_bits_of_tiles_in_c(real, traps, rows, inputs, int8):
    torch.manual_seed(rows)
    x, weight, bias = (torch.randn(*size).bfloat16() for size in ((rows, inputs), (130, inputs), (130,)))

    def run(compiled: CompiledOperators, kind: str) -> torch.Tensor:
        return compiled.linear(x, packed_of(compiled, weight, int8, bias, kind))

    for kind in ("plain", "float", *GATES):
        with executed(traps) as counts, threads_of(2):
            got = run(real, kind)
        assert got.view(torch.uint8).equal(run(operators("emulated"), kind).view(torch.uint8))
        assert not counts or counts["int8" if int8 else "bfloat16"] > 0
        assert not counts or counts["configure"] == counts["release"] > 0


@pytest.mark.parametrize("int8", [False, True])
def test_experts_have_the_bits_of_tiles_in_c(real, traps, int8):
    torch.manual_seed(5)
    counts = [0, 40, 1, 17, 3]
    x, weight = torch.randn(61, 70).bfloat16(), torch.randn(len(counts), 66, 70).bfloat16()

    def run(compiled: CompiledOperators) -> torch.Tensor:
        return compiled.grouped_linear(
            x, packed_experts(compiled, weight, int8, None, "gated"), starts_of(counts)
        )

    with executed(traps), threads_of(2):
        got = run(real)
    assert got.view(torch.uint8).equal(run(operators("emulated")).view(torch.uint8))
