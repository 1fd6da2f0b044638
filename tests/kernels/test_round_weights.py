"""Weights are rounded to the references' values and scales, bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed_weights import Kind, PackedWeight
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.quantized_linear import quantize_weight

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def compiled() -> CompiledOperators:
    return CompiledOperators()


def assert_same_bits(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], wanted[0])
    assert (found[1].shape, found[1].dtype) == (wanted[1].shape, torch.float32)
    assert torch.equal(
        found[1].nan_to_num(7.0).view(torch.int32), wanted[1].nan_to_num(7.0).view(torch.int32)
    )


def assert_packed_alike(
    compiled: CompiledOperators, weight: Tensor, group: int, kind: Kind = "plain"
) -> None:
    """Check that a weight is rounded and packed like the reference."""
    wanted = compiled.pack_int4(*quantize_groups(weight, group), None, group, None, kind)
    found = compiled.pack_rounded_int4(weight, group, None, kind)
    for got, expected in zip(parts(found), parts(wanted), strict=True):
        assert_same_bits((found.panels, got), (wanted.panels, expected))


def parts(weight: PackedWeight) -> list[Tensor]:
    """Return the starts of an int8 weight's columns, and the scales of columns or of their groups."""
    return [part for part in weight._kept[1:3] if part is not None]


def strange(weight: Tensor) -> Tensor:
    """Replace rows by NaN, infinities, 0, -0, tiny, huge, opposite maximum, and halfway values."""
    values = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-39, 1e-44, 3e38, -2e-20, 2e20)
    for row, value in enumerate(values):
        weight[3 * row] = value
        weight[3 * row + 1, 5] = value
    most = weight[31].abs().max()
    weight[31, 3], weight[31, 9] = -most, most
    weight[32, 3], weight[32, 9] = most, -most
    weight[33] = torch.arange(weight.shape[1]) - weight.shape[1] / 2 + 0.5
    weight[34] = (torch.arange(weight.shape[1]) % 31 - 15) * 0.5
    weight[35] = weight[35].sign()
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [16, 63, 96, 320, 1000])
def test_int8(compiled: CompiledOperators, dtype: torch.dtype, inputs: int) -> None:
    weight = strange(torch.randn(500, inputs, generator=torch.Generator().manual_seed(inputs)))
    weight = weight.to(dtype)
    turned = weight.T
    for hadamard in (False, True):
        assert_same_bits(compiled.round_int8(weight, hadamard), quantize_weight(weight, hadamard))
        wanted = quantize_weight(turned.contiguous(), hadamard)
        assert_same_bits(compiled.round_int8(turned, hadamard), wanted)
    for kind, part in (("plain", weight), ("gated", weight[:334]), ("plain", turned)):
        assert_packed_in_int8(compiled, part, kind)


def assert_packed_in_int8(compiled: CompiledOperators, weight: Tensor, kind: Kind) -> None:
    """Assert that a weight is rounded and packed like the reference, as one weight and as one of two experts."""
    wanted = compiled.pack_codes(*quantize_weight(weight.contiguous(), True), None, kind, True)
    both = compiled.pack_rounded_expert_int8(torch.stack([weight, weight.flip(0)]), None, kind)
    for found, at in ((compiled.pack_rounded_int8(weight, None, kind), ...), (both, 0)):
        starts, scales = parts(found)
        assert_same_bits((found.panels[at], scales[at]), (wanted.panels, parts(wanted)[1]))
        assert torch.equal(starts[at], parts(wanted)[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize(("outputs", "kind"), [(2000, "plain"), (1034, "gated"), (37, "plain")])
def test_int4(compiled: CompiledOperators, dtype: torch.dtype, group: int, outputs: int, kind: Kind) -> None:
    weight = strange(torch.randn(outputs, 512, generator=torch.Generator().manual_seed(group)) * 0.02)
    weight = weight.to(dtype)
    assert compiled.rounds_int4(weight, group)
    assert_packed_alike(compiled, weight, group, kind)
    if outputs >= group:
        assert_packed_alike(compiled, weight.T[:, : outputs // group * group], group)


def test_int4_of_experts(compiled: CompiledOperators) -> None:
    weight = torch.randn(3, 70, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    coded = [quantize_groups(matrix, 32) for matrix in weight]
    codes, scales = (torch.stack(each) for each in zip(*coded, strict=True))
    wanted = compiled.pack_expert_int4(codes, scales, None, 32, None, "gated")
    found = compiled.pack_rounded_expert_int4(weight, 32, None, "gated")
    for got, expected in zip(parts(found), parts(wanted), strict=True):
        assert_same_bits((found.panels, got), (wanted.panels, expected))


@pytest.mark.parametrize(("inputs", "group"), [(100, 32), (64, 24), (1024, 512)])
def test_groups_of_other_sizes(compiled: CompiledOperators, inputs: int, group: int) -> None:
    weight = torch.randn(40, inputs)
    assert not compiled.rounds_int4(weight, group)
    assert_packed_alike(compiled, weight, group)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1e-3, 0.05, 1.0, 30.0]), st.sampled_from(DTYPES))
def test_weights_of_few_different_values(seed: int, size: float, dtype: torch.dtype) -> None:
    """Rounding errors are often equal or nearly so."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randint(-6, 7, (60, 64), generator=generator) * size).to(dtype)
    compiled = CompiledOperators()
    assert_packed_alike(compiled, weight, 32)
    assert_same_bits(compiled.round_int8(weight, True), quantize_weight(weight, True))
