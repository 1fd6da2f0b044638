"""Attention of a whole step over a paged KV cache: prefill chunks, single queries, and shared prefixes.

Cost: `attention_cost`, and `merge_state_cost` for the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_plan import LaunchPlan
from batchinfer_kernels.gpu.decode_attention import decode_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import ScoreRules


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    plan: LaunchPlan,
    rules: ScoreRules,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute attention over a paged KV cache for all queries of a step: (T, q_heads, D).

    The contract is `paged_attention_reference`, with the lengths in `plan`. Every layer of a step uses the same plan.

    A plan without prefill items can be captured into a graph. Give `plan_attention` a Room, and keep the plan and the
    block tables. Before each replay call `refilled`, and copy the new block tables into the old ones.

    Args:
        q: (T, q_heads, D), the queries of all sequences.
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as k_cache.
        block_tables: (S, blocks) int32.
        plan: the step's plan from `plan_attention`; it must include the sliding window of `rules`.
        rules: scale, sliding window, cap, sinks and bias of scores.
        k_scale: (blocks, kv_heads, block_size) float32, for a quantised cache.
        v_scale: as k_scale.
        out: like q; receives the output if given.
        lse: (T, q_heads) float32; receives the natural log-sum-exp of scores if given.

    Raises:
        ValueError: If the kernels do not support the arguments.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    places = (q, k_cache, v_cache, block_tables)
    if plan.items is not None:
        prefill_attention(
            *places,
            [],
            [],
            rules,
            k_scale=k_scale,
            v_scale=v_scale,
            items=plan.items,
            deterministic=plan.deterministic,
            causal=plan.causal,
            nearby=plan.nearby,
            out=out,
            lse=lse,
        )
    if plan.singles:
        decode_attention(
            *places,
            plan.contexts,
            plan.splits_of(rules.window),
            rules,
            k_scale=k_scale,
            v_scale=v_scale,
            rows=plan.rows,
            prefixes=plan.prefixes,
            chunks=plan.chunks,
            nearby=None if plan.chunks is None else plan.nearby,
            deterministic=plan.deterministic,
            out=out,
            lse=lse,
        )
    return out
