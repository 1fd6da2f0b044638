"""Attention by other libraries over equal blocks: torch's SDPA on a contiguous copy, its best case, and
FlashInfer, FlashAttention-4 and our Gluon kernel if they can run."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.ops.prompts.flash_attention import FlashAttentionPrefill
from batchinfer.models.ops.prompts.gluon import GluonPrefill
from batchinfer_kernels.gpu.attention_launch import copy_to_device
from batchinfer_kernels.gpu.hopper_tiles import hopper_tokens
from batchinfer_kernels.gpu.prefill_attention import prefill_items
from batchinfer_kernels.paged_attention import ScoreRules
from tests.gpu_suite.paged import Paged
from tests.suite.clock import Call

SDPA, FLASHINFER, CASCADE = "torch SDPA", "FlashInfer", "FlashInfer's cascade"
WORKSPACE_BYTES = 128 * 2**20  # as FlashInfer's documentation recommends
LAYOUT = "HND"  # FlashInfer's name of (blocks, kv, block, dim)


def decode(paged: Paged, q: Tensor) -> dict[str, Call]:
    """Return calls for one query per sequence. SDPA needs contexts of equal lengths."""
    found = {SDPA: sdpa_decode(paged, q)} if len(set(paged.contexts)) == 1 else {}
    return found | _flashinfer(FLASHINFER, _flashinfer_decode, paged, q)


def prefill(paged: Paged, q: Tensor, queries: int) -> dict[str, Call]:
    """Return calls of all libraries except SDPA for `queries` at the end of each sequence."""
    found = _flashinfer(FLASHINFER, _flashinfer_prefill, paged, q, queries)
    if FlashAttentionPrefill.version() is not None:
        found[FlashAttentionPrefill.name] = _flash_attention(paged, q, queries)
    if GluonPrefill.why_not_here(paged.heads.dim, paged.heads.block, q.device) is None:
        found[GluonPrefill.name] = _gluon(paged, q, queries)
    return found


def cascade(paged: Paged, q: Tensor, shared: int) -> dict[str, Call]:
    """Return calls for one query per sequence. The first `shared` keys (whole blocks) are common and read once."""
    return _flashinfer(CASCADE, _flashinfer_cascade, paged, q, shared)


def sdpa_decode(paged: Paged, q: Tensor) -> Call:
    """Return a call of SDPA with a group's heads as queries, its fastest form."""
    heads = paged.heads
    k, v = paged.contiguous()
    grouped = q.reshape(len(q), heads.kv, heads.q // heads.kv, heads.dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(grouped, k, v, scale=heads.scale)


def sdpa_prefill(paged: Paged, q: Tensor, queries: int) -> Call:
    """Return a call whose result is (count, heads, queries, dim)."""
    heads = paged.heads
    k, v = paged.contiguous()
    asked = q.reshape(-1, queries, heads.q, heads.dim).transpose(1, 2)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if queries == k.shape[2]:
        return lambda: sdpa(asked, k, v, is_causal=True, scale=heads.scale, enable_gqa=True)
    # SDPA supports either a bias or GQA
    wide_k, wide_v = (t.repeat_interleave(heads.q // heads.kv, 1) for t in (k, v))
    bias = _lower_right(queries, k.shape[2], q.device)
    return lambda: sdpa(asked, wide_k, wide_v, bias, scale=heads.scale)


def _lower_right(queries: int, keys: int, device: torch.device) -> Any:
    """Return the mask of queries at the end of their keys; on a GPU as a bias with fast kernels."""
    if device.type == "cpu":  # where the import below takes a second
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)


def in_rows(result: Tensor) -> Tensor:
    """Reshape (count, heads, queries, dim) to (tokens, heads, dim)."""
    return result.transpose(1, 2).reshape(-1, result.shape[1], result.shape[3])


def _flash_attention(paged: Paged, q: Tensor, queries: int) -> Call:
    device, out = q.device, torch.empty_like(q)
    starts = torch.arange(0, len(q) + 1, queries, dtype=torch.int32, device=device)
    keys = torch.tensor(paged.contexts, dtype=torch.int32, device=device)
    k, v = paged.k.transpose(1, 2), paged.v.transpose(1, 2)
    lengths = {"cu_seqlens_q": starts, "seqused_k": keys, "page_table": paged.table}

    def call() -> Tensor:
        forward = importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd
        forward(q, k, v, softmax_scale=paged.heads.scale, causal=True, out=out, **lengths)
        return out

    return call


def _gluon(paged: Paged, q: Tensor, queries: int) -> Call:
    kernel, out = importlib.import_module("batchinfer_kernels.gpu.hopper_prefill"), torch.empty_like(q)
    lens, tokens = [queries] * len(paged.contexts), hopper_tokens(paged.heads.q // paged.heads.kv)
    items = copy_to_device(prefill_items(lens, paged.contexts, tokens), q.device)
    rules = ScoreRules(paged.heads.scale)

    def call() -> Tensor:
        kernel.hopper_prefill(q, paged.k, paged.v, paged.table, items, rules, out=out)
        return out

    return call


def has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _flashinfer(name: str, plan: Any, paged: Paged, *given: Any) -> dict[str, Call]:
    """Return a call that plans when it first runs, which reports its errors as its own; empty without
    FlashInfer."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(plan(importlib.import_module("flashinfer"), paged, *given))
        return made[0]()

    return {name: call} if has_flashinfer() else {}


def _flashinfer_decode(package: Any, paged: Paged, q: Tensor) -> Call:
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), LAYOUT, use_tensor_cores=True)
    wrapper.plan(*_pages(paged), *_sizes(paged), q_data_type=q.dtype, kv_data_type=paged.k.dtype)
    return partial(wrapper.run, q, (paged.k, paged.v))


def _flashinfer_prefill(package: Any, paged: Paged, q: Tensor, queries: int) -> Call:
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), LAYOUT)
    starts = torch.arange(0, len(q) + 1, queries, dtype=torch.int32)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": paged.k.dtype}
    wrapper.plan(starts, *_pages(paged), *_sizes(paged), causal=True, **dtypes)
    return partial(wrapper.run, q, (paged.k, paged.v))


def _flashinfer_cascade(package: Any, paged: Paged, q: Tensor, shared: int) -> Call:
    wrapper = package.MultiLevelCascadeAttentionWrapper(2, _workspace(q), LAYOUT)
    block = paged.heads.block
    common = shared // block
    top = torch.tensor([0, common]), paged.table[0, :common], torch.tensor([block])
    levels = [tuple(t.to(q.device, torch.int32) for t in top), _pages(paged, common)]
    rows = [torch.tensor(ends).to(q.device, torch.int32) for ends in ([0, len(q)], range(len(q) + 1))]
    wrapper.plan(rows, *map(list, zip(*levels, strict=True)), *_sizes(paged), q_data_type=q.dtype)
    return partial(wrapper.run, q, (paged.k, paged.v))


def _workspace(q: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _sizes(paged: Paged) -> tuple[int, int, int, int]:
    return paged.heads.q, paged.heads.kv, paged.heads.dim, paged.heads.block


def _pages(paged: Paged, before: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the start of each sequence's blocks, the blocks, and the number of keys in each last block, without the
    first `before` blocks of each sequence; int32.
    """
    block, table = paged.heads.block, paged.table.cpu()[:, before:]
    counts = torch.tensor([-(-context // block) - before for context in paged.contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
    blocks = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = torch.tensor([(context - 1) % block + 1 for context in paged.contexts], dtype=torch.int32)
    return starts, blocks.to(paged.table.device), last
