"""Attention of prompts by FlashInfer (Ye et al., 2025), an optional package.

It reads the same KV cache blocks as batchinfer's kernels: (blocks, KV heads, block size, head size), which it calls
HND.
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
WORKSPACE_BYTES = 128 << 20  # recommended in its documentation
# A wrapper overwrites the host memory from which its plan is copied. With two wrappers, a step can be planned while the
# copy for the previous step may still be running.
WRAPPERS = 2


@dataclass(frozen=True, slots=True, eq=False)
class PromptPages:
    """The prompt chunks of a step and their cache blocks ("pages"), as arguments of FlashInfer.

    The chunks are the rows [first, last) of the step's queries q. All tensors are int32, and only `pages` is on the
    device.

    Attributes:
        first: The first row of q.
        last: The row after the last.
        starts: (n + 1,), the first row of each of n sequences, counted from `first`; and at the end the number of all
            rows.
        page_starts: (n + 1,), the index in `pages` of each sequence's first block; and at the end the number of all
            blocks.
        pages: (page_starts[n],), the blocks of all sequences in order.
        last_page: (n,), the number of keys in the last block of each sequence.
    """

    first: int
    last: int
    starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_page: Tensor

    @classmethod
    def of(cls, inputs: AttentionInputs, block_size: int) -> PromptPages | None:
        """Return the pages of a step's prompt chunks; None if no chunk has at least two queries.

        Args:
            inputs: The inputs of the step.
            block_size: The number of tokens in a block.
        """
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
    theirs: Any
    pages: PromptPages | None = None
    scale: float = 0.0
    copied: torch.cuda.Event | None = None


class FlashInferPrefill(PromptPrefill[PromptPages]):
    """Attention of prompts by FlashInfer's kernels, without windows, soft caps, sinks and quantised caches."""

    name = "FlashInfer"
    distribution = "flashinfer-python"
    extra = "flashinfer"
    HEAD_DIMS: ClassVar[tuple[int, ...]] = (
        64,
        128,
        256,
    )  # head sizes with kernels, or with sources of kernels

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        package: Any = importlib.import_module("flashinfer")
        self._shape, self._block_size = shape, block_size
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        make = package.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [_Wrapper(make(workspace, LAYOUT)) for _ in range(WRAPPERS)]

    @classmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        """Return the reason why FlashInfer does not support the head size; None if it does.

        Args:
            head_dim: The size of a head.
            block_size: Not used.
            device: Not used.
        """
        return None if head_dim in cls.HEAD_DIMS else f"it has no kernels for heads of {head_dim}"

    @classmethod
    def supports(cls, rules: AttentionRules) -> bool:
        """Return True if FlashInfer supports layers with these rules: no window, soft cap, sinks or quantised cache."""
        return rules == AttentionRules()

    def can_read(self, cache: LayerCache) -> bool:
        """Return True if FlashInfer can read this KV cache: it has the dtype of the model."""
        return cache.k.dtype == self._shape.dtype

    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> PromptPages | None:
        """Return the chunks of a step's prompts for FlashInfer; None if there are none, or if all layers have windows.

        Args:
            inputs: The inputs of the step.
            windows: The sliding windows of the layers; None for a layer without a window.
        """
        return PromptPages.of(inputs, self._block_size) if None in windows else None

    def run(self, pages: PromptPages, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """Compute the attention of the planned prompt chunks in one layer, and write it to their rows of `out`.

        See `PromptPrefill.run` for the arguments.
        """
        assert (rules.window, rules.soft_cap, rules.sinks) == (None, None, None)
        rows = slice(pages.first, pages.last)
        self._plan_wrapper(pages, rules.scale).run(q[rows], (cache.k, cache.v), out=out[rows])

    def _plan_wrapper(self, pages: PromptPages, scale: float) -> Any:
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
