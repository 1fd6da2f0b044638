"""Tests the compiled operators for each vector width that this CPU can run."""

from __future__ import annotations

import platform

import pytest
import torch

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.int4_linear import quantize_groups
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.tiles import OPTIONS
from tests.kernels.cpu_kit import DTYPES, TOLERANCE
from tests.kernels.cpu_steps import latent_step, tree_step

# Options that disable instruction sets of `-march=native`; no effect if the CPU has no such set.
NARROWER = {
    "native": (),
    "8 lanes": ("-mno-avx512f", *OPTIONS["none"]),
    "4 lanes": ("-mno-avx2", "-mno-avx512f", *OPTIONS["none"]),
    "4 lanes, no fused multiply-add": ("-mno-avx2", "-mno-avx512f", "-mno-fma", *OPTIONS["none"]),
    "8 lanes, matrix tiles": ("-mno-avx512f", *OPTIONS["emulated"]),
    "4 lanes, matrix tiles": ("-mno-avx2", "-mno-avx512f", "-mno-fma", *OPTIONS["emulated"]),
}
ALWAYS = "native"
X86 = platform.machine() == "x86_64"


@pytest.fixture(
    scope="module",
    params=[name if name == ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in NARROWER],
)
def operators(request, tmp_path_factory) -> CompiledOperators:
    name = request.param
    if name == ALWAYS:
        return CompiledOperators(codes=True)
    if not X86:
        pytest.skip("options for x86-64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *NARROWER[name]))
        found = CompiledOperators(tmp_path_factory.mktemp("kernels"), codes=True)
    if found.lanes > int(name[0]):
        pytest.fail(f"{found.lanes} lanes in spite of {NARROWER[name]}")
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(20, 3), (64, 1), (72, 7)])
def test_shared_prefixes_change_no_bit(operators, dtype, dim, group, codes):
    """A loop for the number of sharing rows computes shared prefixes, another loop a single row."""
    for children in (2, 3, 5):
        for depths, block_size in (([2], 16), ([1], 64), ([3, 2], 5), ([24], 5)):
            step = tree_step(children, 2, group, dim, block_size, children, depths, own=2).to(dtype, codes)
            together = step.attend(operators)
            assert torch.equal(together, step.attend(operators, share=False)), (children, depths, block_size)
            torch.testing.assert_close(together, step.reference(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [3, 33, 200])
def test_a_row_of_a_product_does_not_depend_on_the_others(operators, dtype, inputs):
    torch.manual_seed(inputs)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((18, inputs), (70, inputs), (70,)))
    codes = quantize_weight(weight, True)
    for kind in ("plain", "gated"):
        for packed in (
            operators.pack_linear(weight, bias, kind),
            operators.pack_codes(*codes, bias, kind, True),
        ):
            together = operators.linear(x, packed)
            for rows in (*range(1, 7), 17):
                assert torch.equal(operators.linear(x[:rows].contiguous(), packed), together[:rows])
    plain = operators.linear(x, operators.pack_linear(weight, bias))
    torch.testing.assert_close(plain, torch.nn.functional.linear(x, weight, bias), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 577, 592])
def test_results_of_many_rows_are_those_of_a_row_alone(operators, dtype, width):
    """Many rows bypass the caches when whole lines are stored, a single row never does."""
    torch.manual_seed(width)
    rows, more = 131, 3
    x, other = (torch.randn(rows, width).to(dtype) for _ in range(2))
    weight = torch.randn(width).to(dtype)
    norm = operators._functions["rms_norm", dtype]
    for offset in (0.0, 1.0):
        for first in (0, 1):  # the second begins within a line
            poisoned = torch.full((rows + 2 * more, width), float("nan")).to(dtype)
            y = poisoned.flatten()[more * width + first :]
            total = torch.empty_like(x)
            places = (tensor.data_ptr() for tensor in (x, other, weight, y, total))
            norm(*places, rows, width, 1e-5, offset)
            alone = [
                operators.rms_norm(x[i : i + 1], weight, 1e-5, other[i : i + 1], offset) for i in range(rows)
            ]
            assert torch.equal(
                y[: rows * width].view(rows, width), torch.cat([normed for normed, _ in alone])
            )
            assert torch.equal(total, torch.cat([summed for _, summed in alone]))
            assert y[rows * width :].isnan().all()
            assert poisoned.flatten()[: more * width + first].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [576, 600])
def test_codes_of_many_rows_are_those_of_a_row_alone(operators, dtype, inputs):
    torch.manual_seed(inputs)
    x, weight = torch.randn(131, inputs).to(dtype), torch.randn(40, inputs).to(dtype)
    packed = operators.pack_codes(*quantize_weight(weight, True), None, hadamard=True)
    alone = torch.cat([operators.linear(x[i : i + 1], packed) for i in range(len(x))])
    assert torch.equal(operators.linear(x, packed), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "turned"), [(64, 32), (33, 8)])
def test_a_query_of_latents_does_not_depend_on_the_others(operators, dtype, rank, turned):
    step = latent_step(rank, 6, rank, turned, 24, [(40, 75), (1, 33)]).to(dtype)
    together = step.attend(operators)
    for n in (1, 7, 39):
        assert torch.equal(step.part(0, 0, n).attend(operators), together[:n])
    torch.testing.assert_close(together, step.reference(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_widths_round_weights_equally(operators, dtype):
    weight = (torch.randn(300, 320, generator=torch.Generator().manual_seed(3)) * 0.1).to(dtype)
    weight[7, 5], weight[8], weight[9, 3] = torch.nan, 0.0, 1e-42
    found, wanted = operators.round_int8(weight, True), quantize_weight(weight, True)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1].nan_to_num(3.0), wanted[1].nan_to_num(3.0))
    packed, wanted = operators.pack_rounded_int4(weight, 32, None), quantize_groups(weight, 32)
    expected = operators.pack_int4(*wanted, None, 32, None)
    assert operators.rounds_int4(weight, 32)
    assert torch.equal(packed.panels, expected.panels)
    scales = [weight._kept[2].nan_to_num(3.0) for weight in (packed, expected)]
    assert torch.equal(*scales)
