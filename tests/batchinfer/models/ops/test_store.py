"""Tests that rotated keys and values of foreign code are stored unchanged, on all kinds of operators."""

from __future__ import annotations

import pytest
import torch

from batchinfer.models.ops.attention import AttentionInputs
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference

BLOCK = 8


def cpu(group: int, dim: int, dtype: torch.dtype) -> Ops:
    return choose_ops(torch.device("cpu"), dtype, group, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 2, 12), (1, 4, 64), (4, 1, 20), (3, 2, 6)])
@pytest.mark.parametrize("make", [cpu, lambda *_: TorchOps()], ids=["cpu", "torch"])
def test_attention_reads_the_stored_values(
    make: object, kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    ops = make(group, dim, dtype)  # type: ignore[operator]
    lengths, tables = [11, 3], torch.tensor([[2, 0], [3, 0]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(sum(lengths), heads, dim, generator=generator).to(dtype)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    )
    inputs = AttentionInputs(
        positions=torch.cat([torch.arange(n) for n in lengths]),
        slots=torch.tensor([*range(16, 24), 0, 1, 2, *range(24, 27)]),
        block_tables=tables,
        query_lens=lengths,
        context_lens=lengths,
    )
    cache = ops.allocate_cache(CacheSpec(kv_heads, dim), 4, BLOCK, dtype, "cpu")
    ops.store(k, v, inputs, cache)
    found = ops.attention(q, cache, ops.plan_attention(inputs, BLOCK, frozenset({None})), ScoreRules(0.3))
    plain = [torch.zeros(4, kv_heads, BLOCK, dim, dtype=dtype) for _ in range(2)]
    for part, values in zip(plain, (k, v), strict=True):
        part[inputs.slots // BLOCK, :, inputs.slots % BLOCK] = values
    wanted = paged_attention_reference(q, *plain, tables, lengths, lengths, ScoreRules(0.3))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    out, plan = torch.empty_like(found), ops.plan_attention(inputs, BLOCK, frozenset({None}))
    assert ops.attention(q, cache, plan, ScoreRules(0.3), out).data_ptr() == out.data_ptr()
    assert torch.equal(out, found)
