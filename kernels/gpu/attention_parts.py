"""Parts of attention kept until they are put together: which sequence has which, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import KVTiles, padded_dim, per_head
from batchinfer_kernels.gpu.merge_state import merge_state_kernel


@dataclass(frozen=True, slots=True)
class Own:
    """What each of n rows passes over by itself, and how it is cut. A row is one query of one sequence."""

    contexts: Tensor  # (S,) int32: cached tokens of each sequence
    longest: int  # a bound of them
    window: int | None
    segment: int  # keys
    align: int  # a window's first key is rounded down to it
    rows: Tensor | None = None  # (n, 2) int32: row of q, sequence; None: row i is the query of sequence i
    starts: Tensor | None = None  # (n,) int32: keys before it are shared with other rows; None: 0
    shared: Tensor | None = None  # (n,) int32: how many parts hold these; with `starts`

    @property
    def splits(self) -> int:
        """The most segments that a row has."""
        keys = self.longest if self.window is None else min(self.longest, self.window + self.align)
        return max(1, -(-keys // self.segment))

    def count(self, q: Tensor) -> int:
        return len(q) if self.rows is None else len(self.rows)

    def check(self, q: Tensor, block_tables: Tensor, tiles: KVTiles) -> None:
        """Raises ValueError when lengths or segments do not fit."""
        count = self.count(q)
        sequences = count if self.rows is None else block_tables.shape[0]
        if self.contexts.dtype != torch.int32 or self.contexts.dim() != 1 or len(self.contexts) < sequences:
            lengths = f"{tuple(self.contexts.shape)} {self.contexts.dtype}"
            raise ValueError(f"lengths are {lengths}, for {sequences} sequences")
        if block_tables.shape[0] < sequences:
            raise ValueError(f"{block_tables.shape[0]} block tables for {sequences} sequences")
        shapes = {"rows": (self.rows, (count, 2)), "starts": (self.starts, (count,))}
        for name, (tensor, shape) in {**shapes, "shared": (self.shared, (count,))}.items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.int32):
                raise ValueError(f"{name} are {tuple(tensor.shape)} {tensor.dtype}, expected {shape} int32")
        if (self.starts is None) != (self.shared is None):
            raise ValueError("starts and shared come together")
        if self.segment % tiles.keys or self.segment < 1:
            raise ValueError(f"a segment of {self.segment} keys is not made of tiles of {tiles.keys}")


@dataclass(frozen=True, slots=True)
class Parts:
    """Attention of rows over parts of their keys, and the log2 of the softmaxes' sums."""

    values: Tensor  # (n, slots, q_heads, D) float32
    lses: Tensor  # (n, slots, q_heads) float32
    first_own: int  # slots before it are shared with other rows

    @staticmethod
    def of(q: Tensor, rows: int, shared: int, own: int) -> Parts:
        """Room for them, not filled."""
        shape = (rows, shared + own, q.shape[1])
        values = torch.empty(*shape, q.shape[2], dtype=torch.float32, device=q.device)
        return Parts(values, torch.empty(shape, dtype=torch.float32, device=q.device), shared)


def merge_parts(
    own: Own,
    parts: Parts,
    kv_heads: int,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Every row's shared parts, then its own, folded in this order into its row of `out` and `lse`."""
    rows, _, heads, dim = parts.values.shape
    group = heads // kv_heads
    merge_state_kernel[(rows, kv_heads)](
        parts_ptr=parts.values,
        lses_ptr=parts.lses,
        sinks_ptr=sinks,
        v_scale_ptr=v_scale,
        out_ptr=out,
        lse_ptr=lse,
        rows_ptr=own.rows,
        shared_ptr=own.shared,
        contexts_ptr=own.contexts,
        starts_ptr=own.starts,
        stride_part=parts.values.stride(1),
        stride_token=parts.values.stride(0),
        stride_head=dim,
        lse_stride_part=parts.lses.stride(1),
        lse_stride_token=parts.lses.stride(0),
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        heads=heads,
        parts=0,
        first_own=parts.first_own,
        segment=own.segment,
        window=own.window or 0,
        align=own.align,
        unit=1.0,
        D=dim,
        D_PAD=padded_dim(dim),
        GROUP=group,
        ROWS=triton.next_power_of_2(group),
        V_PER_HEAD=per_head(v_scale),
        WINDOW=own.window is not None,
        num_warps=4,
        enable_fp_fusion=False,
    )
