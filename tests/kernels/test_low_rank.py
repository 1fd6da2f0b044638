"""Products with the low-rank factors of adapters, compared with the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.models.ops.layers import AddedValues
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.low_rank import AdaptedRows, low_rank_reference
from tests.kernels.refused import assert_refused

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def compiled():
    return CompiledOperators()


def some_factors(ranks, inputs, outputs, dtype, seed):
    torch.manual_seed(seed)
    return [
        None
        if rank is None
        else (torch.randn(rank, inputs, dtype=dtype), torch.randn(outputs, rank, dtype=dtype) / 4)
        for rank in ranks
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 90).map(lambda half: 2 * half),
    ranks=st.lists(st.none() | st.integers(1, 33), min_size=3, max_size=3).filter(any),
    kind=st.sampled_from(["plain", "gated"]),
    quantized=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_compiled_products_are_those_of_the_reference(
    compiled, dtype, numbers, inputs, outputs, ranks, kind, quantized, seed
):
    factors = some_factors(ranks, inputs, outputs, dtype, seed)
    x, weight = torch.randn(len(numbers), inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    rows = AdaptedRows.of(torch.tensor(numbers), len(ranks))
    made = compiled.low_rank(x, compiled.pack_factors(factors), rows)
    own = rows.order[int(rows.starts[1]) :]
    wanted = low_rank_reference(x[own], factors, rows.starts[1:] - rows.starts[1], outputs)
    scale = wanted.abs().max().clamp(min=1) if len(wanted) else 1
    assert torch.allclose(made / scale, wanted / scale, atol=1e-5 if dtype == torch.float32 else 2e-2)
    if quantized:
        codes, scales = (
            torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8),
            torch.rand(outputs) / 100,
        )
        packed, plain = (compiled.pack_codes(codes, scales, None, one) for one in (kind, "float"))
    else:
        packed, plain = (compiled.pack_linear(weight, None, one) for one in (kind, "float"))
    found = compiled.adapted_linear(x, packed, made, rows)
    sums = compiled.linear(x, plain) + AddedValues(made, rows).spread()
    assert torch.equal(found, compiled.gate(sums.to(dtype), "gated") if kind == "gated" else sums.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(compiled, dtype):
    factors = some_factors([8, None, 5], 96, 70, dtype, 1)
    packed, x = compiled.pack_factors(factors), torch.randn(30, 96, dtype=dtype)
    numbers = torch.arange(30) % 4

    def made(at):
        rows = AdaptedRows.of(numbers[at], 3)
        values = compiled.low_rank(x[at].contiguous(), packed, rows)
        return AddedValues(values, rows).spread()

    whole = made(slice(None))
    assert torch.equal(whole, torch.cat([made(slice(at, at + 1)) for at in range(30)]))
    assert not whole[numbers == 0].any()
    assert not whole[numbers == 2].any()
    assert whole[numbers == 1].any()


def test_what_does_not_fit_is_refused(compiled):
    factors = some_factors([4, 4], 16, 8, torch.float32, 0)
    packed, x = compiled.pack_factors(factors), torch.randn(3, 16)
    rows = AdaptedRows.of(torch.tensor([0, 1, 2]), 2)
    assert_refused("for 2 tokens", compiled.low_rank, x[:2], packed, rows)
    with pytest.raises(ValueError, match="3 adapters; expected"):
        compiled.low_rank(x, packed, AdaptedRows.of(torch.tensor([0, 1, 2]), 3))
    assert_refused("expected", compiled.low_rank, x.bfloat16(), packed, rows)
    with pytest.raises(ValueError, match="values of adapters"):
        compiled.adapted_linear(x, compiled.pack_linear(torch.randn(8, 16), None), torch.randn(2, 8), rows)
    assert_refused("others", compiled.pack_factors, [factors[0], (torch.randn(4, 15), torch.randn(8, 4))])
    assert_refused("starts", low_rank_reference, x, factors, torch.tensor([0, 3]), 8)
    assert_refused("factors are", low_rank_reference, x, factors, torch.tensor([0, 1, 3]), 9)
