"""Parts are merged as the reference does, and to what attention over all keys gives."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu.merge_state import merge_state
from batchinfer_kernels.merge_state import merge_state_reference
from tests.kernels.gpu.attention_cases import DTYPES, assert_near
from tests.kernels.refused import assert_refused


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


def test_parts_may_lie_in_any_order(device) -> None:
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
