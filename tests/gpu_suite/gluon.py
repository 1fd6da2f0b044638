"""Our kernel in Gluon over the same blocks, where the GPU is one that it is for; nothing where it is not."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer_kernels.gpu.attention_launch import moved
from batchinfer_kernels.gpu.hopper_tiles import hopper_tokens
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from batchinfer_kernels.paged_attention import ScoreRules
from tests.gpu_suite.paged import Paged
from tests.suite.clock import Call


def prefill(paged: Paged, q: Tensor, queries: int) -> dict[str, Call]:
    """`queries` at the end of each sequence."""
    heads = paged.heads
    if GluonPrefill.why_not_here(heads.dim, heads.block, q.device) is not None:
        return {}
    kernel, out = importlib.import_module("batchinfer_kernels.gpu.hopper_prefill"), torch.empty_like(q)
    lens = [queries] * len(paged.contexts)
    items = moved(prefill_items(lens, paged.contexts, hopper_tokens(heads.q // heads.kv)), q.device)

    def call() -> Tensor:
        kernel.hopper_prefill(q, paged.k, paged.v, paged.table, items, ScoreRules(heads.scale), out=out)
        return out

    return {GluonPrefill.name: call}
