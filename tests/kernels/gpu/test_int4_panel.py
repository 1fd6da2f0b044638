"""Tests int4 weights in the layout of checkpoints: packed, widened to a panel, and multiplied by the library."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.gpu.quantized_matmul import int4_weight_matmul, panel_matmul, widen
from batchinfer_kernels.quantized_matmul import (
    Int4Weight,
    int4_values,
    int4_weight_matmul_reference,
    pack_int4_weight,
)
from tests.kernels.gpu.aot import NVIDIA, compile_launch
from tests.kernels.gpu.conftest import DEVICE
from tests.kernels.gpu.matmul_cases import DTYPES, near, random
from tests.kernels.gpu.pairs import pairs_first
from tests.kernels.refused import assert_refused

pytestmark = pytest.mark.usefixtures("as_on_a_gpu")


def stored(
    outputs: int, inputs: int, group: int, zeroed: bool, dtype: torch.dtype
) -> tuple[Int4Weight, Tensor]:
    """Return a stored weight and its dequantised values with scales in `dtype`.

    Args:
        zeroed: if True, groups have zero points, which may be 8.
    """
    generator, groups = torch.Generator().manual_seed(inputs), -(-inputs // group)
    codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=generator)
    scales = 0.01 + torch.rand(outputs, groups, generator=generator)
    zeros = torch.randint(-8, 9, (outputs, groups), generator=generator).float() if zeroed else None
    at = torch.arange(inputs) // group
    steps = codes.float() - (zeros[:, at] if zeros is not None else 0)
    values = (steps * scales.to(dtype).float()[:, at]).to(dtype)
    parts = (None if part is None else part.to(DEVICE) for part in (codes, scales, zeros))
    codes_there, scales_there, zeros_there = parts
    assert codes_there is not None
    assert scales_there is not None
    return pack_int4_weight(codes_there, scales_there, zeros_there, group, dtype), values.to(DEVICE)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("dtype", "group", "zeroed", "sizes"),
    pairs_first(DTYPES, [32, 96, 128, 1280], [False, True], [(1, 1), (70, 130), (37, 257), (200, 384)]),
)
def test_a_panel_has_the_values_and_nothing_outside_is_written(
    dtype: torch.dtype, group: int, zeroed: bool, sizes: tuple[int, int]
) -> None:
    """Bit by bit, for the whole weight and for some of its outputs."""
    weight, values = stored(*sizes, group, zeroed, dtype)
    assert torch.equal(int4_values(weight), values)
    outputs, inputs = sizes
    for first, end in {(0, outputs), (outputs // 3, outputs), (outputs // 2, outputs // 2 + 1)}:
        room = torch.full(((end - first) * inputs + 16,), float("nan"), dtype=dtype, device=DEVICE)
        panel = room[8:-8].view(end - first, inputs)
        widen(weight, first, panel)
        assert torch.equal(panel, values[first:end])
        assert room[:8].isnan().all()
        assert room[-8:].isnan().all()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "biased", "room"), pairs_first(DTYPES, [False, True], [10**6, 200 * 130, 3 * 130])
)
def test_the_library_multiplies_the_widened_weights(dtype: torch.dtype, biased: bool, room: int) -> None:
    """In one part, in parts of whole tiles, and in parts of a few outputs."""
    weight, _ = stored(300, 130, 64, True, dtype)
    x, bias = random(5, 130, dtype=dtype), random(300, dtype=dtype, seed=2) if biased else None
    panel = torch.full((room,), float("nan"), dtype=dtype, device=DEVICE)
    wanted = int4_weight_matmul_reference(x, weight, bias)
    near(panel_matmul(x, weight, bias, panel), wanted)
    near(int4_weight_matmul(x, weight, bias), wanted)


def test_many_rows_go_through_the_panel_and_few_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchinfer.models.ops import gpu_linear
    from batchinfer.models.ops.layers import CodedWeight

    taken: list[str] = []
    for name in ("panel_matmul", "int4_weight_matmul"):
        inner = getattr(gpu_linear, name)
        counting = lambda *a, _inner=inner, _name=name, **k: taken.append(_name) or _inner(*a, **k)  # noqa: E731
        monkeypatch.setattr(gpu_linear, name, counting)
    codes = torch.randint(-8, 8, (96, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    coded = CodedWeight(codes.to(DEVICE), random(96, 2).abs(), group=32)
    panel, peaks = gpu_linear.WeightPanel(), Peaks(1e6, 2e5)
    layer = gpu_linear.WidenedLinear(coded, random(96), "silu", torch.float32, panel, peaks)
    assert 1 < layer.many < 40
    x = random(layer.many, 64)
    whole, part = layer(x), layer(x[:-1])
    assert taken == ["panel_matmul", "int4_weight_matmul"]
    near(part, whole[:-1])
    fixed = gpu_linear.WidenedLinear(coded, random(96), "silu", torch.float32, None, peaks)
    assert torch.equal(fixed(x)[:-1], fixed(x[:-1]))


def test_weights_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2)
    for changed in (
        (codes.int(), scales, None, 32),
        (codes, scales[:, :1], None, 32),
        (codes, torch.ones(4, 4), None, 16),
        (codes, scales, torch.full((4, 2), 9.0), 32),
        (codes, scales, torch.zeros(4, 1), 32),
    ):
        assert_refused(r"codes are|zeros are", pack_int4_weight, *changed, torch.float32)
    weight = pack_int4_weight(codes, scales, None, 32, torch.float32)
    for first, panel in ((0, torch.zeros(5, 64)), (3, torch.zeros(2, 64)), (0, torch.zeros(4, 64).half())):
        assert_refused("a panel", widen, weight, first, panel)
    assert_refused("too small", panel_matmul, torch.zeros(2, 64), weight, None, torch.zeros(63))


def launch_widening(dtype: str, outputs: int, inputs: int, zeroed: bool) -> None:
    """Launch the widening kernel as on a GPU."""
    kind, groups = getattr(torch, dtype), -(-inputs // 128)
    zeros = torch.ones(outputs, groups) if zeroed else None
    codes = torch.zeros(outputs, inputs, dtype=torch.int8)
    weight = pack_int4_weight(codes, torch.ones(outputs, groups), zeros, 128, kind)
    widen(weight, 0, torch.zeros(outputs, inputs, dtype=kind))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("target", "dtype", "zeroed"), pairs_first(NVIDIA, ["bfloat16", "float16", "float32"], [True, False])
)
def test_widening_compiles_without_spills(target: str, dtype: str, zeroed: bool) -> None:
    launch = "tests.kernels.gpu.test_int4_panel:launch_widening"
    (kernel,) = compile_launch(launch, (dtype, 1024, 512, zeroed), target)
    kernel.check()
    assert kernel.wide_stores() >= 1, kernel.summary()
