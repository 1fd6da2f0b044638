"""Attention of prompts by FlashInfer (Ye et al., 2025), an optional package, over the same blocks as our kernels.

It reads the cache as it lies: (blocks, KV heads, block size, head size) is what it calls HND.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.prompts.prefill import PromptPrefill, PromptRows, offsets, upload
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.paged_attention import ScoreRules

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

LAYOUT = "HND"
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
# A plan is copied to the device from memory that the wrapper overwrites with its next plan: with two wrappers nobody
# waits for that copy, as a step is planned while the one before is still running.
WRAPPERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class PromptPages:
    """The chunks of a step and their blocks, as FlashInfer is told of them: rows [first, last) of q, cut at `starts`.
    All are int32; all but the blocks are on the host."""

    first: int
    last: int
    starts: Tensor  # (n + 1,): where each sequence's rows begin, counted from `first`
    page_starts: Tensor  # (n + 1,): where its blocks begin
    pages: Tensor  # (page_starts[n],): blocks, on the device
    last_page: Tensor  # (n,): keys in the last block of each

    @classmethod
    def of(cls, inputs: AttentionInputs, block_size: int) -> PromptPages | None:
        """None where there are no PromptRows."""
        rows = PromptRows.of(inputs)
        if rows is None:
            return None
        counts = -(-rows.contexts // block_size)
        tables = rows.tables.leading(rows.sequences, int(counts.max()))
        pages = tables[np.arange(tables.shape[1]) < counts[:, None]]
        return cls(
            rows.first,
            rows.last,
            torch.from_numpy(offsets(rows.lens)),
            torch.from_numpy(offsets(counts)),
            upload(pages.astype(np.int32), inputs.block_tables.device),
            torch.from_numpy((rows.contexts - (counts - 1) * block_size).astype(np.int32)),
        )


@dataclass(slots=True, eq=False)
class _Wrapper:
    """One of FlashInfer's wrappers, and the plan that it holds."""

    theirs: Any
    pages: PromptPages | None = None
    scale: float = 0.0
    copied: torch.cuda.Event | None = None  # when the plan has reached the device


class FlashInferPrefill(PromptPrefill[PromptPages]):
    """FlashInfer's kernels, for layers with plain attention."""

    name = "FlashInfer"
    distribution = "flashinfer-python"
    extra = "flashinfer"
    HEAD_DIMS: ClassVar[tuple[int, ...]] = (64, 128, 256)  # that it has kernels, or their sources, for

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        package: Any = importlib.import_module("flashinfer")
        self._shape, self._block_size = shape, block_size
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        make = package.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [_Wrapper(make(workspace, LAYOUT)) for _ in range(WRAPPERS)]

    @classmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        return None if head_dim in cls.HEAD_DIMS else f"it has no kernels for heads of {head_dim}"

    @classmethod
    def supports(cls, rules: AttentionRules) -> bool:
        return rules == AttentionRules()

    def can_read(self, cache: LayerCache) -> bool:
        return cache.k.dtype == self._shape.dtype

    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> PromptPages | None:
        return PromptPages.of(inputs, self._block_size) if None in windows else None

    def run(self, pages: PromptPages, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        assert (rules.window, rules.soft_cap, rules.sinks) == (None, None, None)
        rows = slice(pages.first, pages.last)
        self._plan_wrapper(pages, rules.scale).run(q[rows], (cache.k, cache.v), out=out[rows])

    def _plan_wrapper(self, pages: PromptPages, scale: float) -> Any:
        """Return a wrapper that holds the plan: made for the first layer, and read by the others."""
        newest = self._wrappers[-1]
        if newest.pages is pages and newest.scale == scale:
            return newest.theirs
        oldest = self._wrappers.pop(0)
        self._wrappers.append(oldest)
        if oldest.copied is not None:
            oldest.copied.synchronize()
        shape = self._shape
        oldest.theirs.plan(
            *(pages.starts, pages.page_starts, pages.pages, pages.last_page),
            *(shape.q_heads, shape.kv_heads, shape.head_dim, self._block_size),
            causal=True,
            sm_scale=scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        oldest.pages, oldest.scale = pages, scale
        if pages.pages.is_cuda:
            oldest.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            oldest.copied.record()
        return oldest.theirs
