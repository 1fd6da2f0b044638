"""Attention of prompts by FlashInfer (Ye et al., 2025), an optional package, over the same blocks as our kernels.

It reads the cache as it lies: (blocks, KV heads, block size, head size) is what it calls HND. It is given chunks of
several queries alone; single queries, and what these share, stay with our kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.models.ops.interface import AttentionInputs, LayerCache

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

PACKAGE, DISTRIBUTION = "flashinfer", "flashinfer-python"
LAYOUT = "HND"
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
# What it has compiled kernels, or sources of kernels, for
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# A plan is copied to the device from memory that the wrapper overwrites with its next plan: with two wrappers nobody
# waits for that copy, as a step is planned while the one before is still running.
WRAPPERS = 2


def is_installed() -> bool:
    """Whether the package can be imported. It is imported only when it is to be used: that takes seconds."""
    return importlib.util.find_spec(PACKAGE) is not None


def why_not(shape: AttentionShape, latent: bool) -> str | None:
    """Return the reason why a model cannot use it; None if it can."""
    if shape.deterministic:
        return "engine.deterministic is true"
    if latent:
        return "the model's cache keeps latents"
    if not shape.causal:
        return "the model is an encoder, whose tokens see later ones, too"
    if shape.dtype not in DTYPES:
        return f"it has no kernels for {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of {shape.head_dim}"
    return None


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
        """None for a step without chunks of several queries, or whose tables the host cannot read.

        Single queries between chunks are among the rows, with one key: what comes of it is overwritten by the kernel
        that they belong to.
        """
        lens = np.asarray(inputs.query_lens, np.int64)
        several = np.flatnonzero(lens > 1)
        if inputs.host_tables is None or not len(several):
            return None
        span = slice(int(several[0]), int(several[-1]) + 1)
        first = int(lens[: span.start].sum())
        own = lens[span]
        contexts = np.where(own > 1, np.asarray(inputs.context_lens, np.int64)[span], 1)
        counts = -(-contexts // block_size)
        tables = inputs.host_tables.leading(np.arange(span.start, span.stop), int(counts.max()))
        pages = tables[np.arange(tables.shape[1]) < counts[:, None]]
        device = inputs.block_tables.device
        staged = torch.from_numpy(pages.astype(np.int32))
        if device.type == "cuda":
            staged = staged.pin_memory().to(device, non_blocking=True)
        return cls(
            first,
            first + int(own.sum()),
            _starts(own),
            _starts(counts),
            staged,
            torch.from_numpy((contexts - (counts - 1) * block_size).astype(np.int32)),
        )


def _starts(counts: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))


@dataclass(slots=True, eq=False)
class _Wrapper:
    """One of FlashInfer's wrappers, and the plan that it holds."""

    theirs: Any
    pages: PromptPages | None = None
    scale: float = 0.0
    copied: torch.cuda.Event | None = None  # when the plan has reached the device


class FlashInferPrefill:
    """FlashInfer's kernels for a model of such a shape. Raises what importing the package, or a version of it that
    lacks something, raises."""

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        package: Any = importlib.import_module(PACKAGE)
        self.version = str(package.__version__)
        self._shape, self._block_size = shape, block_size
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        make = package.BatchPrefillWithPagedKVCacheWrapper
        self._wrappers = [_Wrapper(make(workspace, LAYOUT)) for _ in range(WRAPPERS)]

    def covers(
        self, cache: LayerCache, window: int | None, soft_cap: float | None, sinks: Tensor | None
    ) -> bool:
        """Whether FlashInfer computes a layer: one with plain attention, over a cache that is not quantised."""
        plain = window is None and soft_cap is None and sinks is None
        return plain and cache.k.dtype == self._shape.dtype

    def plan(self, inputs: AttentionInputs) -> PromptPages | None:
        """Return the pages that it reads in a step; None if there are no prompts."""
        return PromptPages.of(inputs, self._block_size)

    def run(self, pages: PromptPages, q: Tensor, cache: LayerCache, scale: float, out: Tensor) -> None:
        """Write the rows of `out` that belong to the pages; q and out: (T, q_heads, head_dim)."""
        rows = slice(pages.first, pages.last)
        self._planned(pages, scale).run(q[rows], (cache.k, cache.v), out=out[rows])

    def _planned(self, pages: PromptPages, scale: float) -> Any:
        """A wrapper that holds the plan: made for the first layer, and read by the others."""
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
