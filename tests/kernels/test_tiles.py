"""Tests matrix tiles in C: bits follow Intel's manual, nothing outside of a tile is read, and errors are
raised."""

from __future__ import annotations

import ctypes
import errno
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import build
from batchinfer_kernels.tiles import FLAGS, Grant, request_grant
from tests.examples import examples
from tests.kernels.c_units import assembled, compiled_unit
from tests.kernels.cpu_kit import assert_goes_through, operators
from tests.kernels.gpu.interpreter import fused
from tests.kernels.tile_probe import address, multiply, shapes_of

X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture(scope="module")
def probe_path(tmp_path_factory) -> Path:
    return compiled_unit("tile_probe.c", tmp_path_factory.mktemp("probe"), "-DEMULATED_TILES")


@pytest.fixture(scope="module")
def probe(probe_path) -> ctypes.CDLL:
    return ctypes.CDLL(str(probe_path))


def flushed(values: np.ndarray) -> np.ndarray:
    """Return float32 values with denormal numbers replaced by 0."""
    return np.where(np.abs(values) < np.finfo("f4").tiny, np.float32(0), values)


def halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of pairs of bfloat16: the lower halves, and the upper ones."""
    return flushed((words << 16).view("f4")), flushed((words & 0xFFFF0000).view("f4"))


def wanted_bf16(x: np.ndarray, weight: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return sums of even and odd values, each step rounded once, subnormal numbers flushed to 0."""
    sums = []
    for left, right in zip(halves(x), halves(weight), strict=True):
        part = np.zeros(total.shape, np.float32)
        for k in range(x.shape[1]):
            part = flushed(fused(left[:, k, None], right[None, k], part))
        sums.append(part)
    return flushed(flushed(total.view("f4")) + flushed(sums[0] + sums[1]))


def words_of(generator, shape, kind: str):
    """Return pairs of bfloat16 of a kind."""
    if kind == "any bits":
        return generator.integers(0, 2**32, shape, dtype=np.uint32)
    scale = {"usual": 1.0, "tiny": 1e-19, "denormal": 1e-38, "huge": 1e19}[kind]
    values = (generator.standard_normal((*shape, 2)) * scale).astype("f4").view("u4") >> 16
    return (values[..., 0] | values[..., 1] << 16).astype(np.uint32)


KINDS = ["usual", "tiny", "denormal", "huge", "any bits"]


@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 16),
    words=st.integers(1, 16),
    columns=st.integers(1, 16),
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 2),
)
@settings(max_examples=examples(13, 40), deadline=None)
def test_bfloat16_products_have_the_manuals_bits(probe, seed, rows, words, columns, kinds):
    generator = np.random.default_rng(seed)
    x, weight = words_of(generator, (rows, words), kinds[0]), words_of(generator, (words, columns), kinds[1])
    total = generator.standard_normal((rows, columns)).astype("f4").view("u4")
    total[0, 0] = generator.integers(0, 2**32, dtype=np.uint32)
    with np.errstate(all="ignore"):
        wanted = wanted_bf16(x, weight, total)
    np.testing.assert_array_equal(multiply(probe, x, weight, total).view("f4"), wanted)


def bf16(number: float) -> int:
    return int(np.float32(number).view("u4") >> 16)


@pytest.mark.parametrize(("below", "wanted"), [(2.0**-150, 0.0), (2.0**-151, 2.0**-126), (2.0**-149, 0.0)])
def test_a_sum_that_rounds_to_a_normal_number_is_kept(probe, below, wanted):
    """Just below 2^-126: with 24 bits and any exponent it rounds to that number only from a 2^-151 on."""
    x = np.array([[bf16(2.0**-63), bf16(-below * 2.0**63)]], dtype=np.uint32)
    weight = np.array([[bf16(2.0**-63)], [bf16(2.0**-63)]], dtype=np.uint32)
    got = multiply(probe, x, weight, np.zeros((1, 1), np.uint32))
    assert got.view("f4")[0, 0] == wanted


@given(
    seed=st.integers(0, 2**16), rows=st.integers(1, 16), words=st.integers(1, 16), columns=st.integers(1, 16)
)
@settings(max_examples=examples(13, 40), deadline=None)
def test_int8_products_are_exact(probe, seed, rows, words, columns):
    generator = np.random.default_rng(seed)
    x = generator.integers(0, 256, (rows, 4 * words), dtype=np.uint8)
    codes = generator.integers(-128, 128, (4 * words, columns), dtype=np.int8)
    total = generator.integers(-(2**31), 2**31, (rows, columns), dtype=np.int32)
    quads = np.ascontiguousarray(codes.reshape(words, 4, columns).transpose(0, 2, 1)).view("u4")[..., 0]
    got = multiply(probe, x.view("u4"), np.ascontiguousarray(quads), total.view("u4"), codes=True)
    wanted = x.astype(np.int64) @ codes.astype(np.int64) + total
    assert np.array_equal(got.view("i4"), wanted.astype(np.int32))  # modulo 2^32, as the instruction's


def test_a_cleared_tile_is_zero(probe):
    total = np.full((5, 3), 7, np.uint32)
    shapes = shapes_of(5, 1, 3)
    probe.clear(address(shapes), address(total), ctypes.c_int64(total.strides[0]))
    assert not total.any()


CRASHES = """
import ctypes, os, sys
from tests.kernels.tile_probe import *
probe = ctypes.CDLL(sys.argv[1])
for lines in sys.argv[2:]:
    if os.fork() == 0:
        exec(lines)
        os._exit(0)
    print(-os.waitstatus_to_exitcode(os.wait()[1]))
"""


def ended_by(probe_path: Path, *scripts: str) -> list[int]:
    """Return the signal that ends a process for each script, or 0."""
    command = [sys.executable, "-c", CRASHES, str(probe_path), *scripts]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


GUARDED = """
x, weight, total = (at_the_end_of_memory(*size) for size in ((5, 64), (16, 64), (5, 64)))
{}
multiply(probe, x, weight, total.copy())
"""


def test_nothing_after_a_tile_is_read(probe_path):
    """Rows of 64 bytes end at the end of readable memory; one more row would crash."""
    more = "x = np.lib.stride_tricks.as_strided(x, (6, 16), x.strides); total = np.zeros((6, 16), np.uint32)"
    assert ended_by(probe_path, GUARDED.format(""), GUARDED.format(more)) == [0, signal.SIGSEGV]


REFUSED = """
shapes = shapes_of(3, 4, 5)
{}
x, weight, total = (np.zeros((16, 16), np.uint32) for _ in range(3))
multiply(probe, x, weight, total, shapes=shapes)
"""
WRONG_SHAPES = (
    "shapes['rows'][SUM] = 4",
    "shapes['rows'][WEIGHT] = 5",
    "shapes['bytes'][SUM] = 24",
    "shapes['bytes'][X] = 12",
    "shapes['rows'][[SUM, X]] = 17",
    "shapes['bytes'][[SUM, WEIGHT]] = 68",
    "shapes['palette'] = 0",
)


@pytest.mark.skipif(not X86, reason="the signal is that of x86-64")
def test_what_the_instructions_refuse_is_refused(probe_path):
    scripts = [REFUSED.format(change) for change in ("", *WRONG_SHAPES)]
    without_a_shape = "probe.load_without_shape(address(np.zeros(256, np.uint32)))"
    assert ended_by(probe_path, *scripts, without_a_shape) == [0, *[signal.SIGILL] * 8]


CONFIGURED = ("ldtilecfg", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease")


@pytest.mark.skipif(not X86, reason="no such instructions")
@pytest.mark.parametrize(
    ("source", "instructions"),
    [
        ("tile_probe.c", (*CONFIGURED, "tilezero", "tdpbusd")),
        pytest.param(
            str(build.FOLDER / "bfloat16.c"), (*CONFIGURED, "tdpbusd"), marks=pytest.mark.slow
        ),  # which take seconds
        pytest.param(str(build.FOLDER / "attention_bfloat16.c"), CONFIGURED, marks=pytest.mark.slow),
    ],
    ids=["probe", "products", "attention"],
)
def test_tile_instructions_are_used_if_the_compiler_may(source, instructions):
    """Compiled on any CPU for one that has them. -O1, as it does not run."""
    for options in ((), ("-DNO_TILES",)):
        text = assembled(source, "-march=sapphirerapids", "-O1", *options)
        assert {instruction for instruction in instructions if instruction in text} == (
            set() if options else set(instructions)
        )


def test_the_system_is_asked_for_tiles():
    asked = []

    def request(error: int) -> int:
        asked.append(error)
        return error

    assert request_grant(frozenset({"avx512f", "amx_tile"}), lambda: request(0)) == Grant(False)
    assert asked == []  # old systems may not support the system call
    if X86:
        assert request_grant(FLAGS, lambda: request(0)) == Grant(True)
        refused = request_grant(FLAGS, lambda: request(errno.EPERM))
        assert (refused.given, refused.way) == (False, "none")
        assert "Operation not permitted" in refused.refusal


def test_operators_say_what_they_compute_in():
    assert [operators(way).has_tiles for way in ("none", "emulated", "emulated_mmla")] == [False, True, False]


OPERATORS = """
import sys, torch
from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.paged_attention import ScoreRules
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
table = torch.zeros(1, 1, dtype=torch.int32)
for size in (4, 16, 40):
    items = attention_items([size], [size], 3)
    for dim in (20, 64, 80):
        shape = (1, *compiled.cache_shape(1, size, dim))
        q, k, v = (at_the_end(torch.randn(s).bfloat16()) for s in ((size, 3, dim), shape, shape))
        assert compiled.paged_attention(q, k, v, size, table, items, ScoreRules(0.3)).isfinite().all()
    for rank, turned in ((512, 64), (32, 32), (20, 8), (33, 2)):
        cache = at_the_end(torch.randn(1, 1, size, rank + turned).bfloat16())
        q = at_the_end(torch.randn(size, 3, rank + turned).bfloat16())
        assert compiled.latent_attention(q, cache, table, items, 0.3, rank).isfinite().all()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["emulated", "emulated_mmla"])
def test_operators_read_nothing_outside_their_operands(way):
    """Operands of products and attention end at the end of memory."""
    assert_goes_through(OPERATORS, way)
