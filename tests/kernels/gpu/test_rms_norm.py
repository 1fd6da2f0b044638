"""Compares the RMSNorm kernel with its reference."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu import rms_norm as module
from batchinfer_kernels.gpu.rms_norm import rms_norm
from batchinfer_kernels.rms_norm import rms_norm_reference
from tests.examples import first_of
from tests.kernels.gpu.poison import poisoned
from tests.kernels.refused import assert_refused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One rounding of the stored type at values of about 4, where sums in another order tip it
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def case(rows: int, hidden: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + hidden)
    shapes = ((rows, hidden), (rows, hidden), (hidden,))
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


def check(x, weight, residual, offset=0.0) -> None:
    with poisoned():
        got = rms_norm(x, weight, 1e-5, residual, offset)
    wanted = rms_norm_reference(x, weight, 1e-5, residual, offset)
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(got[0], wanted[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[1], wanted[1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden"),
    first_of(
        [(0, 8), (3, 63), (5, 576), (1, 1), (2, 100)]
        + [(4, hidden) for hidden in (2, 16, 127, 1024, 4096, 5120, 8192, 16384, 16385, 20_000)],
        3,
    ),
)
def test_equals_the_reference(device, dtype, rows, hidden):
    x, residual, weight = case(rows, hidden, dtype, device)
    check(x, weight, None)
    check(x, weight, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_may_be_a_difference_from_1(device, dtype):
    """As in Gemma: small differences must not be lost in the sum."""
    x, residual, weight = case(3, 100, dtype, device)
    check(x, weight / 1000, None, 1.0)
    check(x, weight, residual, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_too_long_to_be_held_are_read_twice(device, dtype, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HELD", 64)
    monkeypatch.setattr(module, "PIECE", 32)
    x, residual, weight = case(3, 100, dtype, device)
    check(x, weight, None)
    check(x, weight, residual)


def test_rows_of_more_dimensions_and_strides(device):
    x, _, weight = case(6, 100, torch.float32, device)
    check(x.view(2, 3, 100), weight, None)
    check(x[:, 10:50], weight[10:50], x[:, 50:90])
    check(x.T[:6, :6], weight[:6], x.T[6:12, :6])
    check(x.view(2, 3, 100).transpose(0, 1), weight, None)


def test_a_row_does_not_depend_on_other_rows(device):
    x, residual, weight = case(7, 200, torch.bfloat16, device)
    together = rms_norm(x, weight, 1e-5, residual)[0]
    alone = [rms_norm(x[i : i + 1], weight, 1e-5, residual[i : i + 1])[0] for i in range(7)]
    assert torch.equal(together, torch.cat(alone))


def test_nan_stays_in_its_row(device):
    x, _, weight = case(3, 40, torch.float32, device)
    x[1, 7] = float("nan")
    got = rms_norm(x, weight, 1e-5)[0].isnan()
    assert got.all(1).tolist() == got.any(1).tolist() == [False, True, False]


def test_wrong_operands_are_refused():
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    for wrong in ((x, weight[:7]), (x, weight.half()), (x.double(), weight.double())):
        assert_refused("", rms_norm, *wrong, 1e-5, None)
    assert_refused("", rms_norm, x, weight, 1e-5, x[:1])
