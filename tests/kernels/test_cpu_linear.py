"""Compiled linear layers: equal to torch's, and a row's bits do not depend on other rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed_weights import PackedWeight
from batchinfer_kernels.gated_activation import activation_reference, gated_activation_reference
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.tiles import tile_grant
from tests.examples import examples
from tests.kernels.cpu_kit import DTYPES, WAYS, operators, threads_of
from tests.kernels.gpu.pairs import pairs_first
from tests.kernels.refused import assert_refused

# Sums of a few hundred products of unit normals in float32, then one rounding to the stored type
TOLERANCE = {
    torch.float32: {"atol": 1e-4, "rtol": 1e-5},
    torch.bfloat16: {"atol": 2e-1, "rtol": 1.6e-2},
}

GATES = {
    "gated": "silu",
    "gelu_gated": "gelu_tanh",
    "clamped_gated": "clamped_swiglu",
    "exact_gelu_gated": "gelu",
}
CURVES = {"silu": "silu", "gelu": "gelu_tanh", "exact_gelu": "gelu"}
EMULATED = WAYS[1:]
AVX2_LANES = 8  # a CPU with AVX2 has fused multiply-adds


@pytest.fixture(scope="module", params=WAYS)
def compiled(request) -> CompiledOperators:
    return operators(request.param)


def packed_of(compiled: CompiledOperators, weight, int8: bool, bias=None, kind="plain") -> PackedWeight:
    """Return a weight, packed for the operators. `int8`: quantised."""
    if int8:
        return compiled.pack_codes(*quantize_weight(weight), bias, kind)
    return compiled.pack_linear(weight, bias, kind)


def wide(x, weight, bias):
    """Compute the product in float64, which every path approximates."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 2, 5, 6, 7, 13, 17, 33, 64]),
    inputs=st.sampled_from([1, 2, 3, 31, 32, 64, 129]),
    outputs=st.sampled_from([2, 6, 62, 64, 66, 128, 200]),
    kind=st.sampled_from(["plain", "float", *GATES, *CURVES]),
    biased=st.booleans(),
)
@settings(max_examples=examples(30, 120), deadline=None)
def test_equals_torch(tiles, seed, dtype, rows, inputs, outputs, kind, biased):
    torch.manual_seed(seed)
    compiled = operators(tiles)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    got = compiled.linear(x, compiled.pack_linear(weight, bias, kind))
    assert_near(got, wide(x, weight, bias).float(), kind, dtype)


def finished(product, kind, dtype):
    """Apply the activation and gate of `kind`, and round to `dtype`."""
    if kind in GATES:
        return gated_activation_reference(product.to(dtype), GATES[kind])
    if kind in CURVES:
        return activation_reference(product.to(dtype), CURVES[kind])
    return product.to(torch.float32 if kind == "float" else dtype)


def assert_near(got, product, kind, dtype, step=0.0):
    """Check a product. `step`: its absolute error before the gate. A gate multiplies the errors of its factors."""
    wanted, size = finished(product, kind, dtype), 1 + max(product.abs().flatten().tolist(), default=0.0)
    assert got.dtype == wanted.dtype
    error = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[wanted.dtype] * size + step
    apart = error * (2 * size if kind in GATES else 1)
    assert ((got.float() - wanted.float()).abs() <= apart).all()


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 5, 6, 7, 40]),
    inputs=st.sampled_from([1, 3, 4, 31, 64, 130, 192, 8256]),
    outputs=st.sampled_from([2, 62, 64, 130]),
    kind=st.sampled_from(["plain", "float", *GATES, *CURVES]),
    biased=st.booleans(),
    hadamard=st.booleans(),
)
@settings(max_examples=examples(30, 120), deadline=None)
def test_int8_equals_its_reference(tiles, seed, dtype, rows, inputs, outputs, kind, biased, hadamard):
    torch.manual_seed(seed)
    compiled = operators(tiles)
    x, weight = (torch.randn(rows, inputs) * 3).to(dtype), torch.randn(outputs, inputs).to(dtype)
    x[0] = 0.0
    bias = torch.randn(outputs).to(dtype) if biased else None
    codes, scales = quantize_weight(weight, hadamard)
    got = compiled.linear(x, compiled.pack_codes(codes, scales, bias, kind, hadamard))
    # Without fused multiply-add, a value between two quantised values may be rounded to the other one
    step = 0.0 if compiled.lanes >= AVX2_LANES else 2.2 * x.abs().max() / 127 * weight.abs().max()
    assert_near(got, quantized_linear_reference(x.float(), codes, scales, bias, hadamard), kind, dtype, step)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("dtype", "int8", "inputs"), pairs_first(DTYPES, (False, True), (576, 1537)))
def test_a_row_does_not_depend_on_its_batch(compiled, dtype, int8, inputs):
    torch.manual_seed(1)
    count = 300 if compiled is operators() else 70  # emulation is slow
    x, weight = torch.randn(count, inputs).to(dtype), torch.randn(130, inputs).to(dtype)
    packed = packed_of(compiled, weight, int8)
    whole = compiled.linear(x, packed)
    for threads in (1, 2):
        with threads_of(threads):
            for rows in (1, 2, 3, 5, 6, 7, 16, 17, 33, 64, count - 1):
                assert torch.equal(compiled.linear(x[:rows], packed), whole[:rows])
                assert torch.equal(compiled.linear(x[-rows:].contiguous(), packed), whole[-rows:])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_shows(compiled, value, int8):
    x, weight = torch.ones(3, 40), torch.randn(6, 40)
    x[1, 33] = value
    y = compiled.linear(x, packed_of(compiled, weight, int8))
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("way", EMULATED)
@pytest.mark.parametrize("inputs", [1, 33, 64, 95])
@pytest.mark.parametrize("rows", [1, 2, 17, 33])
def test_a_broken_row_breaks_no_other_in_its_tile(way, rows, inputs):
    """0 x NaN is NaN: neither other rows of a tile nor padding may be multiplied."""
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


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 3, 16, 17, 33, 50]),
    inputs=st.sampled_from([1, 3, 31, 64, 129, 260]),
    outputs=st.sampled_from([2, 6, 62, 64, 130]),
    kind=st.sampled_from(["plain", "float", *GATES, *CURVES]),
    biased=st.booleans(),
)
@settings(max_examples=examples(20, 60), deadline=None)
def test_int8_has_the_bits_of_vectors(seed, dtype, rows, inputs, outputs, kind, biased):
    """Sums are exact: the work key need not distinguish the ways. The greatest result is equal, too."""
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs)
    x[-1, :1] = float("nan")
    bias = torch.randn(outputs).to(dtype) if biased else None
    vectors, *others = [
        (one.linear(x, packed), one.argmax(x, packed) if kind == "float" else None)
        for one in map(operators, ("none", *EMULATED))
        for packed in [packed_of(one, weight, True, bias, kind)]
    ]
    for results, greatest in others:
        assert vectors[0].view(torch.uint8).equal(results.view(torch.uint8))
        assert greatest is None or greatest.equal(vectors[1])


@pytest.mark.skipif(
    not tile_grant().given, reason=tile_grant().refusal or "this CPU has no tiles that are known"
)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 300])
@pytest.mark.parametrize("inputs", [31, 64, 577])
def test_the_cpus_tiles_have_the_bits_of_those_in_c(rows, inputs):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(200, inputs).bfloat16()
    ours, in_c = (one.linear(x, one.pack_linear(weight, None, "float")) for one in map(operators, WAYS[:2]))
    assert ours.equal(in_c)


def test_what_does_not_fit_is_refused(compiled):
    weight = compiled.pack_linear(torch.randn(4, 8), None)
    assert_refused("takes 8 inputs", compiled.linear, torch.randn(2, 7), weight)
    assert_refused("even number", compiled.pack_linear, torch.randn(3, 8), None, "gated")
    assert_refused("is empty", compiled.pack_linear, torch.randn(4, 0), None)
    assert_refused("bias does not match", compiled.pack_linear, torch.randn(4, 8), torch.randn(3))


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([0, 1, 5, 6, 13, 64]),
    outputs=st.sampled_from([1, 3, 63, 64, 65, 200, 1000]),
    steps=st.sampled_from([2, 9, 1000]),
    int8=st.booleans(),
    threads=st.integers(1, 2),
)
@settings(max_examples=examples(30, 150), deadline=None)
def test_the_greatest_result_is_the_first_of_equals(tiles, seed, dtype, rows, outputs, steps, int8, threads):
    """Few different values make many ties. All results of the first row are negative: padding would win."""
    torch.manual_seed(seed)
    compiled = operators(tiles)
    x = torch.randint(1, steps, (rows, 8)).to(dtype) / steps
    weight = torch.randint(-steps, steps, (outputs, 8)).to(dtype)
    weight[:, :4] = -weight[:, :4].abs() - 1
    x[:1, 4:] = 0
    packed = packed_of(compiled, weight, int8, kind="float")
    with threads_of(threads):
        got = compiled.argmax(x, packed)
    assert got.tolist() == [row.index(max(row)) for row in compiled.linear(x, packed).tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_argmax_of_a_row_with_nan_is_minus_one(compiled, dtype, bad):
    weight = torch.zeros(130, 4, dtype=dtype)
    weight[:, 0], weight[70, 1], weight[129, 2] = 1, 1, -1
    packed = compiled.pack_linear(weight, None, "float")
    x = torch.zeros(5, 4, dtype=dtype)
    x[1, 1] = bad  # column 70 is NaN, inf or -inf, and 0 times it elsewhere NaN
    x[2, 0] = bad  # so are all columns
    x[3, 2] = -1.0  # column 129 is the greatest
    x[4] = -0.0
    assert compiled.argmax(x, packed).tolist() == [0, -1, -1, 129, 0]


def test_one_column_that_is_not_finite_is_enough(compiled):
    """inf is no probable token; -inf is just improbable."""
    weight = torch.tensor([[1.0], [0.5], [-1.0]]) * 3e38
    packed = compiled.pack_linear(weight, None, "float")
    assert compiled.linear(torch.tensor([[1.5]]), packed)[0].isinf().tolist() == [True, False, True]
    assert compiled.argmax(torch.tensor([[1.5], [-1.5], [1.0]]), packed).tolist() == [-1, -1, 0]
    weight = torch.tensor([[1.0], [-4.0]]) * 3e38
    packed = compiled.pack_linear(weight, None, "float")
    assert compiled.argmax(torch.tensor([[0.5]]), packed).tolist() == [0]
