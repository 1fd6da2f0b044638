"""Attention of prompts by FlashAttention-4 (Dao et al., the package flash-attn-4), an optional package.

It reads the same KV cache blocks as batchinfer's kernels. It is called by `flash_attn.cute.interface._flash_attn_fwd`,
as in torch's own registration: the public functions cannot write to an existing tensor, and a copy of the result would
take a large part of the time saved.
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
    """The prompt chunks of a step and their cache blocks, as arguments of FlashAttention.

    The chunks are the rows [first, last) of the step's queries q. All tensors are int32 on the device.

    Attributes:
        first: The first row of q.
        last: The row after the last.
        starts: (n + 1,), the first row of each of n sequences, counted from `first`; and at the end the number of all
            rows.
        keys: (n,), the number of keys of each sequence in its blocks.
        tables: (n, maximum blocks), the blocks of each sequence.
    """

    first: int
    last: int
    starts: Tensor
    keys: Tensor
    tables: Tensor

    @classmethod
    def of(
        cls, inputs: AttentionInputs, block_size: int, windows: frozenset[int | None]
    ) -> PromptTables | None:
        """Return the tables of a step's prompt chunks; None if no chunk has at least two queries.

        The tables begin with the first block that a query attends to.

        Args:
            inputs: The inputs of the step.
            block_size: The number of tokens in a block.
            windows: The sliding windows of the layers; None for a layer without a window.
        """
        rows = PromptRows.of(inputs)
        if rows is None:
            return None
        # Blocks before the window may contain NaN. Kernels multiply masked keys in a tile by 0, and 0 * NaN is NaN
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
    widest = [window for window in windows if window is not None]
    if None in windows or not widest:
        return np.zeros(len(rows.lens), np.int64)
    unseen: Longs = np.maximum(0, rows.contexts - rows.lens - max(widest) + 1)
    return unseen


class FlashAttentionPrefill(PromptPrefill[PromptTables]):
    """Attention of prompts by the kernels of FlashAttention-4, which also support windows, soft caps and sinks."""

    name = "FlashAttention-4"
    distribution = "flash-attn-4"
    extra = "flash-attn"
    CAPABILITIES: ClassVar[tuple[int, ...]] = (9, 10, 11)  # GPUs on which it reads from blocks
    HEAD_MULTIPLE: ClassVar[int] = 16  # it pads other heads, but cannot do so in blocks
    # A block of the size of a tile is loaded whole, including values after the sequence's end, which may be NaN
    TILES: ClassVar[tuple[int, ...]] = (64, 80, 96, 112, 128)

    def __init__(self, shape: AttentionShape, block_size: int, device: torch.device) -> None:
        interface: Any = importlib.import_module("flash_attn.cute.interface")
        self._forward: Any = interface._flash_attn_fwd
        self._shape, self._block_size = shape, block_size

    @classmethod
    def why_not_here(cls, head_dim: int, block_size: int, device: torch.device) -> str | None:
        """Return the reason why FlashAttention-4 does not support the GPU or the sizes; None if it does.

        Args:
            head_dim: The size of a head.
            block_size: The number of tokens in a block.
            device: The device of the model.
        """
        major = capability(device)
        if major not in cls.CAPABILITIES:
            return "it reads from blocks on GPUs of compute capability 9, 10 and 11"
        largest = 256 if major == 9 else 128
        if head_dim % cls.HEAD_MULTIPLE or (head_dim > largest and head_dim != 256):
            return f"it has no kernels for heads of {head_dim}"
        if block_size in cls.TILES:
            return f"it would multiply values after the end of a sequence in blocks of {block_size}"
        return None

    @classmethod
    def supports(cls, rules: AttentionRules) -> bool:
        """Return True if the KV cache is not quantised. FlashAttention-4 supports all other rules of layers."""
        return rules.codes is None

    def can_read(self, cache: LayerCache) -> bool:
        """Return True if FlashAttention-4 can read this KV cache: it has the dtype of the model and is aligned."""
        return cache.k.dtype == self._shape.dtype and is_aligned(cache.k) and is_aligned(cache.v)

    def plan(self, inputs: AttentionInputs, windows: frozenset[int | None]) -> PromptTables | None:
        """Return the chunks of a step's prompts for FlashAttention-4; None if no chunk has at least two queries.

        Args:
            inputs: The inputs of the step.
            windows: The sliding windows of the layers; None for a layer without a window.
        """
        return PromptTables.of(inputs, self._block_size, windows)

    def run(self, pages: PromptTables, q: Tensor, cache: LayerCache, rules: ScoreRules, out: Tensor) -> None:
        """Compute the attention of the planned prompt chunks in one layer, and write it to their rows of `out`.

        See `PromptPrefill.run` for the arguments.
        """
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
