"""Attention of a whole step over a paged KV cache: chunks, single queries, and what these share.

Cost: `attention_cost`, with `merge_state_cost` for the parts.
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
    """As `paged_attention_reference`, with the lengths in `plan`, which `plan_attention` makes once a step.

    Every layer of the step calls this with the same plan, made for its window among others, and block tables (S, max
    blocks) int32.
    Where the plan has no chunks it can be captured into a graph; give plan_attention a Room, keep the plan and the
    block tables where they are, and before each replay `refill` the one and copy into the other.
    A bias of an encoder changes nothing for a prompt of one token, which sees itself alone.
    `out`: like q; `lse`: (T, q_heads) float32; written if given. Raises ValueError for what the kernels do not cover.
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
