"""FlashInfer's kernels over the same blocks, where it is installed; nothing where it is not."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu_suite.paged import Paged
from tests.suite.clock import Call

NAME, CASCADE = "FlashInfer", "FlashInfer's cascade"
WORKSPACE_BYTES = 128 * 2**20  # what its documentation recommends
LAYOUT = "HND"  # (blocks, kv, block, dim), as ours


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def decode(paged: Paged, q: Tensor) -> dict[str, Call]:
    """One query a sequence."""
    if not is_installed():
        return {}
    return {NAME: _planned_later(partial(_decode, paged, q))}


def prefill(paged: Paged, q: Tensor, queries: int) -> dict[str, Call]:
    """`queries` at the end of each sequence."""
    if not is_installed():
        return {}
    return {NAME: _planned_later(partial(_prefill, paged, q, queries))}


def cascade(paged: Paged, q: Tensor, shared: int) -> dict[str, Call]:
    """One query a sequence; the first `shared` keys, whole blocks, are the same for all and read once."""
    if not is_installed():
        return {}
    return {CASCADE: _planned_later(partial(_cascade, paged, q, shared))}


def _planned_later(make: partial[Call]) -> Call:
    """It is planned at the first call, so that what goes wrong in it goes wrong there and is told as its own."""
    made: list[Call] = []

    def call() -> Any:
        if not made:
            made.append(make())
        return made[0]()

    return call


def _decode(paged: Paged, q: Tensor) -> Call:
    package, heads = importlib.import_module("flashinfer"), paged.heads
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), LAYOUT, use_tensor_cores=True)
    sizes = (heads.q, heads.kv, heads.dim, heads.block)
    wrapper.plan(*_pages(paged), *sizes, q_data_type=q.dtype, kv_data_type=paged.k.dtype)
    return lambda: wrapper.run(q, (paged.k, paged.v))


def _prefill(paged: Paged, q: Tensor, queries: int) -> Call:
    package, heads = importlib.import_module("flashinfer"), paged.heads
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), LAYOUT)
    starts = torch.arange(0, len(q) + 1, queries, dtype=torch.int32)
    sizes = (heads.q, heads.kv, heads.dim, heads.block)
    wrapper.plan(starts, *_pages(paged), *sizes, causal=True, q_data_type=q.dtype, kv_data_type=paged.k.dtype)
    return lambda: wrapper.run(q, (paged.k, paged.v))


def _cascade(paged: Paged, q: Tensor, shared: int) -> Call:
    package, heads, device = importlib.import_module("flashinfer"), paged.heads, q.device
    wrapper = package.MultiLevelCascadeAttentionWrapper(2, _workspace(q), LAYOUT)
    common = shared // heads.block
    top = torch.tensor([0, common]), paged.table[0, :common], torch.tensor([heads.block])
    levels = [tuple(t.to(device, torch.int32) for t in top), _pages(paged, common)]
    rows = [torch.tensor([0, len(q)]), torch.arange(len(q) + 1)]
    sizes = (heads.q, heads.kv, heads.dim, heads.block)
    told = [[level[of] for level in levels] for of in range(3)]
    wrapper.plan([r.to(device, torch.int32) for r in rows], *told, *sizes, q_data_type=q.dtype)
    return lambda: wrapper.run(q, (paged.k, paged.v))


def _workspace(q: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _pages(paged: Paged, before: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's blocks begin, the blocks, and how many keys are in each last one; int32. Without the first
    `before` blocks of each."""
    block, table = paged.heads.block, paged.table.cpu()[:, before:]
    counts = torch.tensor([-(-context // block) - before for context in paged.contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
    blocks = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = torch.tensor([(context - 1) % block + 1 for context in paged.contexts], dtype=torch.int32)
    return starts, blocks.to(paged.table.device), last
