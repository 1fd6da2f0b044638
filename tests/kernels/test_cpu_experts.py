"""Compiled experts: equal to the reference, and a row's bits do not depend on other rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed_weights import PackedExperts
from batchinfer_kernels.experts import (
    Choice,
    choose_experts,
    combine_reference,
    experts_reference,
    group_by_expert,
)
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.mxfp4 import mxfp4_values
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.routing import Routing
from tests.examples import examples
from tests.kernels.cpu_kit import DTYPES, WAYS, operators, threads_of
from tests.kernels.gpu.pairs import pairs_first
from tests.kernels.refused import assert_refused
from tests.kernels.test_cpu_linear import TOLERANCE, assert_near, packed_of

COUNT = 5


@pytest.fixture(scope="module", params=WAYS)
def compiled(request) -> CompiledOperators:
    return operators(request.param)


def coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (E, N, K) to values and scales per output."""
    codes, scales = quantize_weight(weight.flatten(0, 1))
    return codes.view(weight.shape), scales.view(weight.shape[:2])


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def choice_of(tokens: int, chosen: int = 2, count: int = COUNT, seed: int = 0) -> Choice:
    logits = torch.randn(tokens, count, generator=torch.Generator().manual_seed(seed))
    return choose_experts(logits, Routing(count, chosen, normalised=True))


def in_int4(weight: Tensor, zeroed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantise (E, N, K) to values, scales and optional zero points of groups of 32."""
    codes, scales = quantize_groups(weight.flatten(0, 1), 32)
    zeros = torch.randint(-8, 9, scales.shape).float() if zeroed else None
    split = (None if part is None else part.view(*weight.shape[:2], -1) for part in (codes, scales, zeros))
    return tuple(split)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeroed", [False, True])
def test_int4_rows_equal_those_of_the_linear_layer(compiled, dtype, zeroed):
    """Bit by bit, also gated; and experts equal their products one by one."""
    torch.manual_seed(2)
    for inputs, kind in ((131, "gated"), (160, "plain")):
        counts = [0, 7, 1, 0, 12]
        x, starts = torch.randn(sum(counts), inputs).to(dtype), starts_of(counts)
        parts = in_int4(torch.randn(COUNT, 130, inputs), zeroed)
        bias = torch.randn(COUNT, 130).to(dtype)
        got = compiled.grouped_linear(x, compiled.pack_expert_int4(*parts, 32, bias, kind), starts)
        for expert, (first, end) in enumerate(pairwise(starts.tolist())):
            of_one = [None if part is None else part[expert] for part in parts]
            single = compiled.pack_int4(*of_one, 32, bias[expert], kind)
            assert torch.equal(got[first:end], compiled.linear(x[first:end], single))
    gate_up, down = torch.randn(COUNT, 2 * 64, 96), torch.randn(COUNT, 96, 64)
    packed = [
        compiled.pack_expert_int4(*in_int4(part, zeroed), 32, None, kind)
        for part, kind in ((gate_up, "gated"), (down, "plain"))
    ]
    x, choice = torch.randn(23, 96).to(dtype), choice_of(23)
    groups = group_by_expert(choice.experts, COUNT)
    inner = compiled.grouped_linear(x[groups.order // 2], packed[0], groups.starts)
    made = compiled.grouped_linear(inner, packed[1], groups.starts)
    wanted = combine_reference(made, groups.order, choice.weights)
    assert torch.equal(compiled.experts(x, *packed, choice, torch.zeros(COUNT).long()), wanted)


def packed_experts(compiled, weight, int8: bool, bias=None, kind="plain") -> PackedExperts:
    """Return the experts' weights, packed for the operators. `int8`: quantised."""
    if int8:
        return compiled.pack_expert_codes(*coded(weight), bias, kind)
    return compiled.pack_experts(weight, bias, kind)


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 6, 7, 13, 40]), min_size=1, max_size=9),
    inputs=st.sampled_from([1, 3, 31, 64, 129]),
    outputs=st.sampled_from([2, 6, 62, 64, 66, 130]),
    kind=st.sampled_from(["plain", "gated"]),
    biased=st.booleans(),
    int8=st.booleans(),
)
@settings(max_examples=examples(25, 120), deadline=None)
def test_grouped_products_equal_the_reference(
    tiles, seed, dtype, counts, inputs, outputs, kind, biased, int8
):
    torch.manual_seed(seed)
    compiled = operators(tiles)
    x, weight = torch.randn(sum(counts), inputs), torch.randn(len(counts), outputs, inputs).to(dtype)
    x, starts = x.to(dtype), starts_of(counts)
    bias = torch.randn(len(counts), outputs).to(dtype) if biased else None
    got = compiled.grouped_linear(x, packed_experts(compiled, weight, int8, bias, kind), starts)
    weight, scales = coded(weight) if int8 else (weight, None)
    assert_near(got, grouped_matmul_reference(x, weight, starts, bias, scales=scales), kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_each_row_equals_that_of_the_linear_layer(compiled, dtype, int8):
    """Bit by bit: the tiles are the same."""
    torch.manual_seed(2)
    counts = [0, 7, 1, 0, 12]
    x, weight = torch.randn(sum(counts), 131).to(dtype), torch.randn(COUNT, 130, 131).to(dtype)
    starts = starts_of(counts)
    got = compiled.grouped_linear(x, packed_experts(compiled, weight, int8), starts)
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        single = packed_of(compiled, weight[expert], int8)
        assert torch.equal(got[first:end], compiled.linear(x[first:end], single))


def packed_pair(compiled, dtype, int8=False, biased=False, hidden=70, inner=37, count=COUNT, kind="gated"):
    """Return the packed weights of both products, and the arguments of the reference."""
    torch.manual_seed(4)
    gate_up = torch.randn(count, 2 * inner, hidden).to(dtype) / 8
    down = torch.randn(count, hidden, inner).to(dtype) / 8
    biases = [torch.randn(part.shape[:2]).to(dtype) if biased else None for part in (gate_up, down)]
    first = packed_experts(compiled, gate_up, int8, biases[0], kind)
    return (first, packed_experts(compiled, down, int8, biases[1])), (gate_up, down, biases)


@pytest.mark.parametrize(
    ("dtype", "biased", "tokens", "chosen", "gate"),
    pairs_first(
        DTYPES,
        [False, True],
        [0, 1, 2, 40],
        [1, 2, 5],
        [("gated", "silu"), ("gelu_gated", "gelu_tanh"), ("clamped_gated", "clamped_swiglu")],
    ),
)
def test_experts_equal_the_reference(compiled, dtype, biased, tokens, chosen, gate):
    kind, activation = gate
    packed, (gate_up, down, biases) = packed_pair(compiled, dtype, biased=biased, kind=kind)
    x, choice, loads = torch.randn(tokens, 70).to(dtype), choice_of(tokens, chosen), torch.full((COUNT,), 3)
    got = compiled.experts(x, *packed, choice, loads)
    wanted = experts_reference(x, gate_up, down, choice, activation, *biases)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    assert loads.tolist() == [3 + int((choice.experts == e).sum()) for e in range(COUNT)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_experts_are_their_products_one_by_one(compiled, dtype):
    packed, _ = packed_pair(compiled, dtype, int8=True)
    x, choice = torch.randn(23, 70).to(dtype), choice_of(23)
    groups = group_by_expert(choice.experts, COUNT)
    inner = compiled.grouped_linear(x[groups.order // 2], packed[0], groups.starts)
    made = compiled.grouped_linear(inner, packed[1], groups.starts)
    wanted = combine_reference(made, groups.order, choice.weights)
    assert torch.equal(compiled.experts(x, *packed, choice, torch.zeros(COUNT).long()), wanted)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_a_token_does_not_depend_on_its_batch(compiled, dtype, int8):
    packed, _ = packed_pair(compiled, dtype, int8=int8, hidden=131)
    x, choice, loads = torch.randn(200, 131).to(dtype), choice_of(200, 3), torch.zeros(COUNT).long()
    whole = compiled.experts(x, *packed, choice, loads)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(5))
    for threads in (1, 2):
        with threads_of(threads):
            for rows in (*(torch.arange(n) for n in (1, 2, 6, 7, 64, 199)), torch.arange(193, 200), order):
                part = Choice(choice.experts[rows].contiguous(), choice.weights[rows].contiguous())
                assert torch.equal(compiled.experts(x[rows].contiguous(), *packed, part, loads), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tokens_on_one_expert_read_no_other_expert(compiled, dtype):
    packed, (gate_up, down, _) = packed_pair(compiled, dtype)
    for weight in packed:
        kept = weight.panels[3].clone()
        weight.panels.fill_(float("nan"))
        weight.panels[3] = kept
    choice = Choice(torch.full((30, 1), 3), torch.rand(30, 1))
    x, loads = torch.randn(30, 70).to(dtype), torch.zeros(COUNT).long()
    got = compiled.experts(x, *packed, choice, loads)
    torch.testing.assert_close(got, experts_reference(x, gate_up, down, choice, "silu"), **TOLERANCE[dtype])
    assert loads.tolist() == [0, 0, 0, 30, 0]


@pytest.mark.parametrize("tiles", WAYS)
@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from(DTYPES),
    tokens=st.sampled_from([1, 2, 7, 40, 100]),
    hidden=st.sampled_from([32, 96, 160]),
    inner=st.sampled_from([32, 64, 96]),
    biased=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
@settings(max_examples=examples(20, 100), deadline=None)
def test_mxfp4_has_the_bits_of_its_dequantised_values(
    tiles, seed, dtype, tokens, hidden, inner, biased, threads
):
    generator, compiled = torch.Generator().manual_seed(seed), operators(tiles)
    packed, widened = [], []
    for outputs, inputs, kind in ((2 * inner, hidden, "clamped_gated"), (hidden, inner, "plain")):
        codes = torch.randint(0, 256, (COUNT, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
        shape = (COUNT, outputs, inputs // 32)
        exponents = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        bias = torch.randn(COUNT, outputs, generator=generator).to(dtype) if biased else None
        packed.append(compiled.pack_expert_mxfp4(codes, exponents, bias, kind))
        widened.append(compiled.pack_experts(mxfp4_values(codes, exponents).to(dtype), bias, kind))
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    choice, loads = choice_of(tokens, seed=seed), torch.zeros(COUNT).long()
    with threads_of(threads):
        got, wanted = (compiled.experts(x, *each, choice, loads) for each in (packed, widened))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("tiles", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_a_linear_layer_in_mxfp4_has_the_bits_of_its_dequantised_weight(tiles, dtype, kind):
    """Without adapters and with some."""
    generator, compiled = torch.Generator().manual_seed(3), operators(tiles)
    codes = torch.randint(0, 256, (70, 48), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(118, 124, (70, 3), generator=generator, dtype=torch.uint8)
    bias = torch.randn(70, generator=generator).to(dtype)
    packed = compiled.pack_mxfp4(codes, exponents, bias, kind)
    values = mxfp4_values(codes[None], exponents[None])[0].to(dtype)
    widened = compiled.pack_linear(values, bias, kind)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 96), (70, 16)))
    factors = compiled.pack_factors([(a, b)])
    for tokens in (1, 5, 49, 130):
        x = torch.randn(tokens, 96, generator=generator).to(dtype)
        assert torch.equal(compiled.linear(x, packed), compiled.linear(x, widened))
        rows = AdaptedRows.of(torch.arange(tokens) % 2, 1)
        added = compiled.low_rank(x, factors, rows)
        got, wanted = (compiled.adapted_linear(x, each, added, rows) for each in (packed, widened))
        assert torch.equal(got, wanted)


def test_every_code_and_exponent_of_mxfp4_is_exact(compiled):
    """A row with a single 1 returns a weight. AVX512_BF16 flushes numbers below 2^-126 to 0."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(253, 1)
    exponents = torch.arange(253, dtype=torch.uint8).repeat_interleave(16)
    stored, starts = (codes[None], exponents[None, :, None]), starts_of([32])
    packed, values = compiled.pack_expert_mxfp4(*stored, None), mxfp4_values(*stored)[0].T
    for dtype in DTYPES:
        x, widened = torch.eye(32).to(dtype), compiled.pack_experts(values.T[None].to(dtype), None)
        got, usual = compiled.grouped_linear(x, packed, starts), values.abs() >= 2.0**-126
        assert torch.equal(got, compiled.grouped_linear(x, widened, starts))
        assert torch.equal(got[usual], values.to(dtype)[usual])


def test_what_does_not_fit_is_refused(compiled):
    (gate_up, down), _ = packed_pair(compiled, torch.float32)
    x, choice, loads = torch.randn(4, 70), choice_of(4), torch.zeros(COUNT).long()
    beyond, below = (Choice(torch.full((4, 2), bad), choice.weights) for bad in (COUNT, -1))
    given = {"x": x, "gate_up": gate_up, "down": down, "choice": choice, "loads": loads}
    for wrong, words in (
        ({"choice": beyond}, "an expert below 0 or above 4"),
        ({"choice": below}, "an expert below 0 or above 4"),
        ({"x": x[:, :69].contiguous()}, "take 70 inputs"),
        ({"gate_up": down, "down": gate_up}, "do not match"),
        ({"x": x[:3]}, "experts are"),
        ({"loads": loads[1:]}, "loads are"),
        ({"x": x.bfloat16()}, r"x is torch.bfloat16"),
    ):
        assert_refused(words, compiled.experts, **{**given, **wrong})
    assert_refused("starts are", compiled.grouped_linear, x, gate_up, starts_of([1, 1, 1, 0, 0]))
    assert_refused("not matrices", compiled.pack_experts, torch.randn(4, 8), None)
