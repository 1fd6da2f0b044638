"""Products in matrix tiles and by matrix multiply-accumulate: int8 with the bits of vectors, nothing read beside x and
the weight."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import build
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.tiles import FLAGS, Grant, TileWay, ask, tile_grant
from tests.examples import examples
from tests.kernels.c_units import assembled
from tests.kernels.test_cpu_linear import GATES, operators
from tests.kernels.test_cpu_operators import DTYPES

EMULATED: tuple[TileWay, ...] = ("emulated", "emulated_mmla")
X86 = platform.machine() in ("x86_64", "AMD64")


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 3, 16, 17, 33, 50]),
    inputs=st.sampled_from([1, 3, 31, 64, 129, 260]),
    outputs=st.sampled_from([2, 6, 62, 64, 130]),
    kind=st.sampled_from(["plain", "float", *GATES]),
    biased=st.booleans(),
)
@settings(max_examples=examples(20, 60), deadline=None)
def test_int8_has_the_bits_of_vectors(seed, dtype, rows, inputs, outputs, kind, biased):
    """Sums are exact: so no key need tell them apart."""
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs)
    x[-1, :1] = float("nan")
    bias = torch.randn(outputs).to(dtype) if biased else None
    found = [
        one.linear(x, one.pack_codes(*quantize_weight(weight), bias, kind))
        for one in map(operators, ("none", *EMULATED))
    ]
    for other in found[1:]:
        assert found[0].view(torch.uint8).equal(other.view(torch.uint8))


@pytest.mark.skipif(
    not tile_grant().given, reason=tile_grant().refusal or "this CPU has no tiles that are known"
)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 300])
@pytest.mark.parametrize("inputs", [31, 64, 577])
def test_the_cpus_tiles_have_the_bits_of_those_in_c(rows, inputs):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(200, inputs).bfloat16()
    found = [
        one.linear(x, one.pack_linear(weight, None, "float")) for one in (operators(), operators("emulated"))
    ]
    assert found[0].equal(found[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_finds_the_same_greatest(dtype):
    torch.manual_seed(7)
    x, weight = torch.randn(37, 70).to(dtype), quantize_weight(torch.randn(300, 70))
    none, *others = map(operators, ("none", *EMULATED))
    wanted = none.argmax(x, none.pack_codes(*weight, None, "float"))
    for one in others:
        assert one.argmax(x, one.pack_codes(*weight, None, "float")).equal(wanted)


@pytest.mark.parametrize("way", EMULATED)
@pytest.mark.parametrize("inputs", [1, 33, 64, 95])
@pytest.mark.parametrize("rows", [1, 2, 17, 33])
def test_a_broken_row_breaks_no_other(way, rows, inputs):
    """0 x NaN is NaN: neither the rows of a tile nor what lies behind a row's end may meet."""
    torch.manual_seed(3)
    compiled = operators(way)
    room = torch.full((rows + 2, inputs), float("nan"), dtype=torch.bfloat16)
    room[1:-1] = torch.randn(rows, inputs)
    packed = compiled.pack_linear(torch.randn(70, inputs).bfloat16(), None)
    whole = compiled.linear(room[1:-1], packed)
    assert whole.isfinite().all()
    for broken in {0, rows // 2, rows - 1}:
        x = room[1:-1].clone()
        x[broken, -1] = float("inf")
        got = compiled.linear(x, packed)
        others = [row for row in range(rows) if row != broken]
        assert got[others].equal(whole[others])
        assert not got[broken].isfinite().any()


GUARDED = """
import sys, torch
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.quantized_linear import quantize_weight
from tests.kernels.guarded_tensor import at_the_end

compiled = CompiledOperators(tiles=sys.argv[1])
torch.manual_seed(0)
for rows in (1, 16, 17, 33):
    for inputs in (1, 31, 64, 97):
        weight = torch.randn(130, inputs)
        plain, codes = compiled.pack_linear(weight.bfloat16(), None), quantize_weight(weight)
        for packed in (plain, compiled.pack_codes(*codes, None)):
            panels = at_the_end(packed.panels)
            packed.structure.panels = panels.data_ptr()
            x = at_the_end(torch.randn(rows, inputs).bfloat16())
            assert compiled.linear(x, packed).isfinite().all()
print("went through")
"""


@pytest.mark.parametrize("way", EMULATED)
def test_nothing_beside_x_and_the_weight_is_read(way):
    """Both end where memory does."""
    done = subprocess.run([sys.executable, "-c", GUARDED, way], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "went through"), done.stderr


@pytest.mark.skipif(not X86, reason="no such instructions")
@pytest.mark.parametrize(("options", "found"), [((), True), (("-DNO_TILES",), False)])
def test_the_operators_use_tiles_where_the_system_grants_them(options, found):
    """Compiled for a CPU that has them, on any; -O1, since it is not run."""
    text = assembled(str(build.FOLDER / "bfloat16.c"), "-march=sapphirerapids", "-O1", *options)
    for instruction in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbusd", "tilestored", "tilerelease"):
        assert (instruction in text) == found


def test_what_is_granted_is_asked_for():
    asked = []

    def request(error: int) -> int:
        asked.append(error)
        return error

    assert ask(frozenset({"avx512f", "amx_tile"}), lambda: request(0)) == Grant(False)
    assert asked == []  # a system that knows no tiles may not know the question
    if X86:
        assert ask(FLAGS, lambda: request(0)) == Grant(True)
        refused = ask(FLAGS, lambda: request(errno.EPERM))
        assert (refused.given, refused.way) == (False, "none")
        assert "Operation not permitted" in refused.refusal


def test_operators_say_what_they_compute_in():
    assert operators("emulated").has_tiles
    assert not operators("none").has_tiles
    assert not operators("emulated_mmla").has_tiles
