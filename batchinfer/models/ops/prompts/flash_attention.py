"""Attention of prompts by FlashAttention-4 (Dao et al., the package flash-attn-4), an optional package, over the same
blocks as our kernels.

It is called by `flash_attn.cute.interface._flash_attn_fwd`, as torch's own registration of it is: the public functions
cannot write to a tensor that is there already, and a copy of the result would take a good part of the time won.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.prompts.prefill import (
    Longs,
    PromptPrefill,
    PromptRows,
    capability,
    is_aligned,
    offsets,
    upload,
)
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.paged_attention import ScoreRules

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape


@dataclass(frozen=True, slots=True, eq=False)
class PromptTables:
    """The chunks of a step and their blocks, as FlashAttention is told of them: rows [first, last) of q, cut at
    `starts`. All are int32 on the device."""

    first: int
    last: int
    starts: Tensor  # (n + 1,): where each sequence's rows begin, counted from `first`
    keys: Tensor  # (n,): how many keys of the blocks are the sequence's
    tables: Tensor  # (n, most blocks)

    @classmethod
    def of(
        cls, inputs: AttentionInputs, block_size: int, windows: frozenset[int | None]
    ) -> PromptTables | None:
        """Return the tables; None where there are no PromptRows.

        Tables begin with the first block that a query sees. A kernel reads tiles of keys, and multiplies masked ones by
        0: what blocks hold that the windows have left must not be among them, as 0 × NaN is NaN.
        """
        rows = PromptRows.of(inputs)
        if rows is None:
            return None
        unseen = _unseen(rows, windows) // block_size
        keys = rows.contexts - unseen * block_size
        counts = -(-keys // block_size)
        leading = rows.tables.leading(rows.sequences, int((unseen + counts).max()))
        column = unseen[:, None] + np.minimum(np.arange(counts.max()), counts[:, None] - 1)
        tables = np.take_along_axis(leading, column, axis=1)
        told = (offsets(rows.lens), keys.astype(np.int32), tables.astype(np.int32))
        flat = upload(np.concatenate([part.ravel() for part in told]), inputs.block_tables.device)
        parts = torch.split(flat, [part.size for part in told])
        return cls(rows.first, rows.last, parts[0], parts[1], parts[2].view(tables.shape))


def _unseen(rows: PromptRows, windows: frozenset[int | None]) -> Longs:
    """Return how many leading keys of each sequence no query of it sees through any of the windows, (n,)."""
    widest = [window for window in windows if window is not None]
    if None in windows or not widest:
        return np.zeros(len(rows.lens), np.int64)
    unseen: Longs = np.maximum(0, rows.contexts - rows.lens - max(widest) + 1)
    return unseen


class FlashAttentionPrefill(PromptPrefill[PromptTables]):
    """FlashAttention-4's kernels, for layers with windows, soft caps and sinks, too."""

    name = "FlashAttention-4"
    distribution = "flash-attn-4"
    extra = "flash-attn"
    CAPABILITIES: ClassVar[tuple[int, ...]] = (9, 10, 11)  # where it reads from blocks
    HEAD_MULTIPLE: ClassVar[int] = 16  # it pads other heads, and not in blocks
    # A block of as many keys as one of its tiles is loaded whole, with what lies behind the sequence's end; see
    # PromptTables
    TILES: ClassVar[tuple[int, ...]] = (64, 80, 96, 112, 128)

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        self._forward: Any = interface._flash_attn_fwd
        self._shape, self._block_size = shape, block_size

    @classmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        major = capability(device)
        if major not in cls.CAPABILITIES:
            return "it reads from blocks on GPUs of compute capability 9, 10 and 11"
        largest = 256 if major == 9 else 128
        if head_dim % cls.HEAD_MULTIPLE or (head_dim > largest and head_dim != 256):
            return f"it has no kernels for heads of {head_dim}"
        if block_size in cls.TILES:
            return f"it would multiply what lies behind the end of blocks of {block_size}"
        return None

    @classmethod
    def supports(cls, rules: AttentionRules) -> bool:
        return rules.codes is None

    def can_read(self, cache: LayerCache) -> bool:
        # What is not aligned it would copy, the whole cache, before it is read
        return cache.k.dtype == self._shape.dtype and is_aligned(cache.k) and is_aligned(cache.v)

    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> PromptTables | None:
        return PromptTables.of(inputs, self._block_size, windows)

    def run(self, pages: PromptTables, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """K and V are (blocks, block size, KV heads, head size) for it, in whatever order they lie."""
        rows = slice(pages.first, pages.last)
        self._forward(
            q[rows],
            cache.k.transpose(1, 2),
            cache.v.transpose(1, 2),
            cu_seqlens_q=pages.starts,
            seqused_k=pages.keys,
            page_table=pages.tables,
            softmax_scale=rules.scale,
            causal=True,
            softcap=rules.soft_cap,
            window_size_left=None if rules.window is None else rules.window - 1,
            learnable_sink=rules.sinks,
            out=out[rows],
        )
