"""FlashAttention-4's kernels over the same blocks, where it is installed; nothing where it is not."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill
from tests.gpu_suite.paged import Paged
from tests.suite.clock import Call


def prefill(paged: Paged, q: Tensor, queries: int) -> dict[str, Call]:
    """`queries` at the end of each sequence."""
    if FlashAttentionPrefill.version() is None:
        return {}
    device, out = q.device, torch.empty_like(q)
    starts = torch.arange(0, len(q) + 1, queries, dtype=torch.int32, device=device)
    keys = torch.tensor(paged.contexts, dtype=torch.int32, device=device)
    k, v = paged.k.transpose(1, 2), paged.v.transpose(1, 2)

    def call() -> Tensor:
        interface = importlib.import_module("flash_attn.cute.interface")
        interface._flash_attn_fwd(
            *(q, k, v),
            cu_seqlens_q=starts,
            seqused_k=keys,
            page_table=paged.table,
            softmax_scale=paged.heads.scale,
            causal=True,
            out=out,
        )
        return out

    return {FlashAttentionPrefill.name: call}
