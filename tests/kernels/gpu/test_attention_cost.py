"""The declared cost of attention is what its references multiply and touch, counted while they run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batchinfer_kernels.cost import attention_cost, merge_state_cost
from batchinfer_kernels.merge_state import merge_state_reference
from batchinfer_kernels.paged_attention import gather_cached
from tests.kernels.gpu.attention_cases import paged_case


def counted_bytes(case, out: torch.Tensor) -> int:
    """Queries, results, and each sequence's keys and values (2 keys or more: torch does not count products of one)."""
    cached = [
        gather_cached(cache, case.table[i], context).nbytes
        for i, context in enumerate(case.contexts)
        for cache in (case.k, case.v, *(case.scales or ()))
    ]
    return case.q.nbytes + out.nbytes + sum(cached)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_single_queries(cache_dtype) -> None:
    case = paged_case([(1, 5), (1, 33), (1, 2)], 2, 3, 80, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    with FlopCounterMode(display=False) as counter:
        out, _ = case.reference()
    cost = attention_cost(3, 40, 40, 6, 2, 80, 2, cache_dtype is not None)
    assert (cost.flops, cost.bytes) == (counter.get_total_flops(), counted_bytes(case, out))


@pytest.mark.parametrize("window", [None, 4])
def test_chunks_attend_what_they_see(window) -> None:
    """Query by query: the reference multiplies what a mask hides too, where a chunk is more than one."""
    case, pairs, flops = paged_case([(6, 20), (3, 5)], 1, 2), 0, 0
    out, _ = case.reference(window)
    for row, (queries, context) in enumerate(case.chunks):
        for at in range(context - queries, context):
            seen = at + 1 if window is None else min(at + 1, window)
            single = paged_case([(1, seen)], 1, 2, seed=row)
            with FlopCounterMode(display=False) as counter:
                single.reference()
            pairs, flops = pairs + seen, flops + counter.get_total_flops()
    cost = attention_cost(9, pairs, 25, 2, 1, 64, 4)
    assert (cost.flops, cost.bytes) == (flops, counted_bytes(case, out))


def test_merged_parts() -> None:
    outs, lses = torch.randn(3, 5, 4, 64), torch.randn(3, 5, 4)
    touched = [outs, lses, *merge_state_reference(outs, lses)]
    cost = merge_state_cost(3, 5, 4, 64, 4)
    assert cost.bytes == sum(tensor.nbytes for tensor in touched)
    assert cost.flops == 2 * outs.numel()
