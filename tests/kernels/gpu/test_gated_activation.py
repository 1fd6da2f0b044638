"""Compares the gated activation kernel with its reference."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.gpu.gated_activation import gated_activation
from tests.examples import first_of
from tests.kernels.gpu.poison import poisoned
from tests.kernels.refused import assert_refused

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
# Two roundings of the stored type, relative
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# An activation is x times a factor between 0 and 1: (1 + erf) / 2, or a sigmoid. Near 0 the factor has the absolute
# error of the values around 1 that it was a difference of: 2 units of 2^-24, erf's own. So gate × up scales the error.
FACTOR = 2 * 2.0**-24


def check(gate_up, activation) -> None:
    """Compare with float64: torch's vectorised float32 gelu is off by 6 units, the kernel by 2."""
    with poisoned():
        got = gated_activation(gate_up, activation)
    wanted = gated_activation_reference(gate_up.double(), activation)
    gate, up = gate_up.double().chunk(2, -1)
    smallest = torch.finfo(gate_up.dtype).smallest_normal * torch.finfo(gate_up.dtype).eps
    bound = TOLERANCE[gate_up.dtype] * wanted.abs() + FACTOR * (gate * up).abs() + smallest * (1 + up.abs())
    assert got.dtype == gate_up.dtype
    assert torch.equal(got.isnan(), wanted.isnan())
    assert ((got - wanted).abs() <= bound)[~wanted.isnan()].all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "intermediate"),
    first_of(
        [(0, 4), (3, 63), (2, 1500), (1, 1), (2, 100)]
        + [(5, size) for size in (2, 127, 1023, 1024, 1025, 4096, 14_336)],
        3,
    ),
)
def test_equals_the_reference(device, dtype, activation, rows, intermediate):
    generator = torch.Generator().manual_seed(intermediate)
    gate_up = (torch.randn(rows, 2 * intermediate, generator=generator) * 3).to(dtype).to(device)
    check(gate_up, activation)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_values_and_nan(device, dtype, activation):
    gate = torch.tensor([0.0, -0.0, -90.0, 90.0, -200.0, 200.0, -5e4, 5e4, float("nan"), 1.0])
    up = torch.tensor([1.0] * 9 + [float("nan")])
    check(torch.cat((gate, up))[None].to(dtype).to(device), activation)


def test_rows_may_be_strided(device):
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).to(device)
    check(wide[::2, 10:70], "silu")


def test_wrong_operands_are_refused():
    x = torch.zeros(2, 8)
    for gate_up in (x[:, :7], x[0], x.double(), torch.zeros(8, 2).T):
        assert_refused("", gated_activation, gate_up, "silu")
    assert_refused("", gated_activation, x, "relu")
