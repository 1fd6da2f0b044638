"""Products of int4 weights and int8 activations: compared with the reference, and row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cost import int4_linear_cost
from batchinfer_kernels.cpu.packed_weights import Kind
from batchinfer_kernels.int4_linear import int4_linear_reference, quantize_groups
from tests.examples import examples
from tests.kernels.cpu_kit import WAYS, operators
from tests.kernels.test_cpu_linear import GATES, assert_near


@given(
    tiles=st.sampled_from(WAYS),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.one_of(st.integers(1, 14), st.sampled_from([16, 17, 33, 65, 81])),
    inputs=st.sampled_from([1, 8, 63, 64, 130, 257]),
    outputs=st.sampled_from([2, 62, 64, 130]),
    group=st.sampled_from([8, 32, 64, 96, 128, 264]),
    zeroed=st.booleans(),
    kind=st.sampled_from(["plain", "float", *GATES]),
    biased=st.booleans(),
)
@settings(max_examples=examples(60, 300), deadline=None)
def test_equals_its_reference_and_a_row_alone(
    tiles, seed, dtype, rows, inputs, outputs, group, zeroed, kind: Kind, biased
):
    torch.manual_seed(seed)
    compiled = operators(tiles)
    x = (torch.randn(rows, inputs) * 3).to(dtype)
    x[0] = 0.0
    codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
    groups = -(-inputs // group)
    scales = torch.randn(outputs, groups) * 0.1
    zeros = torch.randint(-8, 8, (outputs, groups)).float() if zeroed else None
    bias = torch.randn(outputs).to(dtype) if biased else None
    packed = compiled.pack_int4(codes, scales, zeros, group, bias, kind)
    got = compiled.linear(x, packed)
    wanted = int4_linear_reference(x.float(), codes, scales, zeros, group, bias)
    # Without fused multiply-add, a value between two quantised values may be rounded to the other one
    assert_near(got, wanted, kind, dtype, 0.0 if compiled.lanes >= 8 else 2e-2 * float(wanted.abs().max()))
    alone = torch.cat([compiled.linear(x[i : i + 1], packed) for i in range(rows)])
    assert torch.equal(got, alone)


@pytest.mark.parametrize("group", [8, 32])
def test_rounding(group: int) -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    codes, scales = quantize_groups(weight, group)
    spread = scales.repeat_interleave(group, 1)[:, :40]
    assert int(codes.min()) == -8
    off = (codes * spread - weight) / spread
    assert float(off[(codes > -8) & (codes < 7)].abs().max()) <= 0.5001
    largest = torch.nn.functional.pad(weight, (0, -40 % group)).view(5, -1, group).abs().amax(-1) / 8
    plain = largest.repeat_interleave(group, 1)[:, :40]
    rounded = (weight / plain).round().clamp(-8, 7) * plain
    assert float((codes * spread - weight).square().sum()) < float((rounded - weight).square().sum())
    strange = weight.clone()
    strange[1, 3] = torch.inf
    assert quantize_groups(strange, group)[1][1, 0].isnan()
    assert int(quantize_groups(torch.zeros(2, 16), group)[0].abs().max()) == 0


def test_wrong_shapes() -> None:
    compiled, codes = operators(WAYS[0]), torch.zeros(4, 16, dtype=torch.int8)
    for scales, group in (
        (torch.ones(4, 1), 8),
        (torch.ones(3, 2), 8),
        (torch.ones(4, 2), 12),
        (torch.ones(4, 2), 0),
    ):
        with pytest.raises(ValueError, match="scales are"):
            compiled.pack_int4(codes, scales, None, group, None)


def test_the_cost_of_int4_counts_each_weight_once() -> None:
    """Half a byte per value, and a scale per group."""
    tokens, inputs, outputs, group = 5, 200, 128, 32
    codes, scales = quantize_groups(torch.randn(outputs, inputs), group)
    packed = operators(WAYS[0]).pack_int4(codes, scales, None, group, None)
    found = int4_linear_cost(tokens, inputs, outputs, 2, group)
    activations = 2 * tokens * (inputs + outputs)
    held = 256 * outputs // 2  # inputs are padded to whole lines
    assert packed.panels.numel() == held
    # The start value per output is not counted, like the sums of int8
    assert found.bytes == activations + inputs * outputs // 2 + scales.nbytes
    assert found.coded_ops == 2 * tokens * inputs * outputs
    assert found.flops == found.coded_ops + tokens * (3 * inputs + 2 + (2 + 2 * 7) * outputs), "7 groups"
