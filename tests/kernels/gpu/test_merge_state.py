"""Tests that partial results merge like the reference, and to attention over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import MAX_GROUP, padded_dim
from batchinfer_kernels.gpu.merge_state import merge_state_kernel
from batchinfer_kernels.gpu.sizes import next_power_of_2
from batchinfer_kernels.merge_state import check_merge_state, merge_state_reference
from tests.kernels.gpu.attention_cases import DTYPES, assert_near
from tests.kernels.refused import assert_refused

LOG2E = 1.4426950408889634


def merge_state(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge like `merge_state_reference`, with one launch of the kernel that merges partial attention."""
    check_merge_state(outs, lses, sinks)
    if outs.stride(3) != 1 or lses.stride(2) != 1:
        raise ValueError(f"outs have strides {outs.stride()}, their log-sum-exps {lses.stride()}")
    parts, tokens, heads, dim = outs.shape
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    together = min(heads, MAX_GROUP)
    if tokens:
        merge_state_kernel[(tokens, -(-heads // together))](
            parts_ptr=outs,
            lses_ptr=lses,
            sinks_ptr=sinks,
            out_ptr=out,
            lse_ptr=lse,
            rows_ptr=None,
            shared_ptr=None,
            places_ptr=None,
            stride_part=outs.stride(0),
            stride_token=outs.stride(1),
            stride_head=outs.stride(2),
            lse_stride_part=lses.stride(0),
            lse_stride_token=lses.stride(1),
            out_stride_token=out.stride(0),
            out_stride_head=out.stride(1),
            heads=heads,
            parts=parts,
            first_own=0,
            unit=LOG2E,
            D=dim,
            D_PAD=padded_dim(dim),
            GROUP=together,
            ROWS=next_power_of_2(together),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out, lse


def parts_of(parts, tokens, heads, dim, dtype, device):
    generator = torch.Generator().manual_seed(parts + heads)
    outs = torch.randn(parts, tokens, heads, dim, generator=generator).to(dtype).to(device)
    return outs, torch.randn(parts, tokens, heads, generator=generator).mul(3).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "tokens", "heads", "dim"), [(1, 2, 1, 64), (3, 5, 6, 80), (4, 2, 40, 256)])
def test_merged_as_the_reference(parts, tokens, heads, dim, dtype, device) -> None:
    outs, lses = parts_of(parts, tokens, heads, dim, dtype, device)
    for sinks in (None, torch.linspace(-2, 2, heads, device=device)):
        for got, wanted in zip(
            merge_state(outs, lses, sinks), merge_state_reference(outs, lses, sinks), strict=True
        ):
            assert_near(got, wanted, dtype)


def test_a_part_that_sees_nothing_may_hold_anything(device) -> None:
    outs, lses = parts_of(3, 4, 2, 64, torch.float32, device)
    lses[1, :2] = lses[0, 1] = lses[:, 3] = float("-inf")
    outs[lses == float("-inf")] = float("nan")
    out, lse = merge_state(outs, lses)
    wanted, wanted_lse = merge_state_reference(outs, lses)
    assert_near(out, wanted, torch.float32)
    assert (out[3] == 0).all()
    assert (lse[3] == float("-inf")).all()
    assert_near(lse[:3], wanted_lse[:3], torch.float32)


def test_a_nan_shows(device) -> None:
    outs, lses = parts_of(2, 2, 1, 64, torch.float32, device)
    outs[1, 0] = float("nan")
    out, _ = merge_state(outs, lses)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_parts_may_be_in_any_order(device) -> None:
    outs, lses = parts_of(3, 4, 2, 64, torch.float32, device)
    turned = outs.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    assert torch.equal(merge_state(turned, lses)[0], merge_state(outs, lses)[0])


def test_no_tokens(device) -> None:
    outs, lses = parts_of(2, 0, 4, 64, torch.float32, device)
    assert merge_state(outs, lses)[0].shape == (0, 4, 64)


def test_shapes_that_do_not_fit_are_refused(device) -> None:
    outs, lses = parts_of(2, 3, 4, 64, torch.float32, device)
    for wrong in (lses[:1], lses.double(), lses[..., :3]):
        assert_refused("log-sum-exps", merge_state, outs, wrong)
    assert_refused("sinks", merge_state, outs, lses, torch.zeros(3, device=device))
    assert_refused("strides", merge_state, outs.transpose(1, 3), lses[:, :1].expand(2, 64, 4))
