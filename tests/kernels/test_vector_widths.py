"""The compiled operators for each width of vector that this CPU can run: what one kind of machine shows, on any."""

from __future__ import annotations

import platform

import pytest
import torch

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.latent_attention import latent_attention_reference
from batchinfer_kernels.paged_attention import paged_attention_reference
from batchinfer_kernels.quantized_linear import quantize_weight
from batchinfer_kernels.tiles import OPTIONS
from tests.kernels.test_cpu_attention import attend, tree_case
from tests.kernels.test_cpu_codes import attend as attend_codes
from tests.kernels.test_cpu_codes import coded
from tests.kernels.test_cpu_operators import DTYPES, TOLERANCE
from tests.kernels.test_latent_attention import attend as attend_latents
from tests.kernels.test_latent_attention import latent_case

# What takes an instruction set away from `-march=native`. An option for a set that is not there changes nothing.
NARROWER = {
    "native": (),
    "8 lanes": ("-mno-avx512f",),
    "4 lanes": ("-mno-avx2", "-mno-avx512f"),
    "4 lanes, no fused multiply-add": ("-mno-avx2", "-mno-avx512f", "-mno-fma"),
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
        pytest.skip("the options are those of x86-64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, *NARROWER[name]))
        found = CompiledOperators(tmp_path_factory.mktemp("kernels"), codes=True)
    if found.lanes > int(name[0]):
        pytest.fail(f"{found.lanes} lanes in spite of {NARROWER[name]}")
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [20, 64, 72])
@pytest.mark.parametrize("group", [1, 3])
def test_shared_prefixes_change_no_bit(operators, dtype, dim, group):
    """Rows of a shared prefix go through a loop that is compiled for their number, alone through the one for one."""
    for children in (2, 3, 5):
        for depths, block_size in (([2], 16), ([1], 64), ([3, 2], 5), ([24], 5)):
            q, caches, table, contexts = tree_case(
                children, dtype, 2, group, dim, block_size, children, depths, own=2
            )
            one = [1] * len(contexts)
            together = attend(operators, q, caches, table, one, contexts, 0.2)
            apart = attend(operators, q, caches, table, one, contexts, 0.2, share=False)
            assert torch.equal(together, apart), (children, depths, block_size)
            wanted = paged_attention_reference(q, *caches, table, one, contexts, 0.2)
            torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "group"), [(20, 3), (64, 1), (72, 7)])
def test_shared_prefixes_change_no_bit_of_codes(operators, dtype, dim, group):
    for children, depths, block_size in ((2, [2], 16), (5, [1], 64), (3, [3, 2], 5)):
        q, values, table, contexts = tree_case(1, dtype, 2, group, dim, block_size, children, depths, own=2)
        caches, scales = zip(*map(coded, values), strict=True)
        step = (table, [1] * len(contexts), contexts, 0.2)
        together = attend_codes(operators, q, caches, scales, *step)
        assert torch.equal(together, attend_codes(operators, q, caches, scales, *step, share=False))
        wanted = paged_attention_reference(q, *caches, *step, k_scale=scales[0], v_scale=scales[1])
        torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [3, 33, 200])
def test_a_row_of_a_product_does_not_depend_on_the_others(operators, dtype, inputs):
    torch.manual_seed(inputs)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((18, inputs), (70, inputs), (70,)))
    codes = quantize_weight(weight)
    for kind in ("plain", "gated"):
        for packed in (operators.pack_linear(weight, bias, kind), operators.pack_codes(*codes, bias, kind)):
            together = operators.linear(x, packed)
            for rows in (*range(1, 7), 17):
                assert torch.equal(operators.linear(x[:rows].contiguous(), packed), together[:rows])
    plain = operators.linear(x, operators.pack_linear(weight, bias))
    torch.testing.assert_close(plain, torch.nn.functional.linear(x, weight, bias), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 577, 592])
def test_results_of_many_rows_are_those_of_a_row_alone(operators, dtype, width):
    """Many rows are stored past the caches where whole lines are written, one row never is."""
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
            norm(
                x.data_ptr(),
                other.data_ptr(),
                weight.data_ptr(),
                y.data_ptr(),
                total.data_ptr(),
                rows,
                width,
                1e-5,
                offset,
            )
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
    packed = operators.pack_codes(*quantize_weight(weight), None)
    alone = torch.cat([operators.linear(x[i : i + 1], packed) for i in range(len(x))])
    assert torch.equal(operators.linear(x, packed), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "turned"), [(64, 32), (33, 8)])
def test_a_query_of_latents_does_not_depend_on_the_others(operators, dtype, rank, turned):
    chunks = [(40, 75), (1, 33)]
    q, cache, table, queries, contexts = latent_case(rank, 6, rank, turned, 24, chunks)
    q, cache = q.to(dtype), cache.to(dtype)
    together = attend_latents(operators, q, cache, table, queries, contexts, 0.3, rank)
    for n in (1, 7, 39):
        alone = attend_latents(operators, q[:n], cache, table[:1], [n], [35 + n], 0.3, rank)
        assert torch.equal(alone, together[:n])
    wanted = latent_attention_reference(q, cache, table, queries, contexts, 0.3, rank)
    torch.testing.assert_close(together, wanted, **TOLERANCE[dtype])
