"""FlashInfer's kernels over the same blocks, where it is installed; nothing where it is not."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.gpu_suite.clock import Call
from tests.gpu_suite.paged import Paged

NAME = "FlashInfer"
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


def _workspace(q: Tensor) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)


def _pages(paged: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """Where each sequence's blocks begin, the blocks, and how many keys are in each last one; int32."""
    block, table = paged.heads.block, paged.table.cpu()
    counts = torch.tensor([-(-context // block) for context in paged.contexts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(torch.int32)
    blocks = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    last = torch.tensor([(context - 1) % block + 1 for context in paged.contexts], dtype=torch.int32)
    return starts, blocks.to(paged.table.device), last
