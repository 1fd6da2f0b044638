"""Buffers of partial attention results, and their merge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import padded_dim
from batchinfer_kernels.gpu.attention_splits import Splits
from batchinfer_kernels.gpu.merge_state import merge_state_kernel
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class OwnKeys:
    """The keys that n rows of decode attention read for themselves, and how these keys are split among programs.

    Other keys are shared: they are read once per group of rows. A row is one query of one sequence or, with `chunks`,
    all queries of one sequence. S and T are the numbers of sequences and of query tokens.

    Attributes:
        contexts: (S,) int32, number of keys of each sequence; with `chunks` (T,), number of keys that each query sees.
        splits: how each row's own keys are split.
        rows: (n, 2) int32, for each row its index in q and the index of its sequence; None: both are i for row i.
        starts: (n,) int32, number of leading keys of each row that are shared, and not read here; None: 0.
        shared: (queries + 1,) int32: query i has the partial results [shared[i], shared[i + 1]) over shared keys. Given
            together with `starts`.
        chunks: (S, 2) int32, the first row of q and the number of queries of each sequence; None: each has one query.
        nearby: (T,) int32, TreeMask.nearby, only with `chunks`; None: no query is in a draft tree.
    """

    contexts: Tensor
    splits: Splits
    rows: Tensor | None = None
    starts: Tensor | None = None
    shared: Tensor | None = None
    chunks: Tensor | None = None
    nearby: Tensor | None = None

    def check(self, q: Tensor, block_tables: Tensor, window: int | None) -> None:
        """Raise ValueError unless the tensors match q and the block tables, and splits are for this sliding window."""
        queries = len(q) if self.rows is None else len(self.rows)
        count = queries if self.chunks is None else len(self.chunks)
        sequences = count if self.rows is None else block_tables.shape[0]
        lengths = sequences if self.chunks is None else queries
        if self.contexts.dtype != torch.int32 or self.contexts.dim() != 1 or len(self.contexts) < lengths:
            found = f"{tuple(self.contexts.shape)} {self.contexts.dtype}"
            raise ValueError(f"lengths are {found}, for {sequences} sequences with {queries} queries")
        if block_tables.shape[0] < sequences:
            raise ValueError(f"{block_tables.shape[0]} block tables for {sequences} sequences")
        shapes = {
            "rows": (self.rows, (count, 2)),
            "starts": (self.starts, (count,)),
            "shared": (self.shared, (queries + 1,)),
            "chunks": (self.chunks, (count, 2)),
            "nearby": (self.nearby, (queries,)),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.int32):
                raise ValueError(f"{name} are {tuple(tensor.shape)} {tensor.dtype}, expected {shape} int32")
        if (self.starts is None) != (self.shared is None):
            raise ValueError("starts and shared must be given together")
        if self.chunks is not None and self.rows is not None:
            raise ValueError("chunks and rows cannot be given together")
        if self.nearby is not None and (self.chunks is None or window is not None):
            raise ValueError("nearby requires chunks and excludes a window")
        if len(self.splits.keys) != count or self.splits.window != window:
            made = f"{len(self.splits.keys)} rows with a window of {self.splits.window}"
            raise ValueError(f"splits are for {made}, expected {count} with {window}")
        if len(self.splits.places) != queries + 1:
            raise ValueError(f"splits are for {len(self.splits.places) - 1} queries, expected {queries}")


@dataclass(frozen=True, slots=True)
class Parts:
    """Buffers for partial attention results: the output of a query over a part of its keys, and its log2-sum-exp.

    Parts over shared keys come first, at the indices in `Prefixes.places`. Parts over a row's own keys follow, at the
    indices in `Splits.places`.

    Attributes:
        values: (shared + own parts, q_heads, D) float32, the attention output over each part.
        lses: (shared + own parts, q_heads) float32, the log2-sum-exp of each part's scores.
        first_own: index of the first part over own keys.
    """

    values: Tensor
    lses: Tensor
    first_own: int

    @staticmethod
    def of(q: Tensor, shared: int, own: int) -> Parts:
        """Allocate the buffers on q's device.

        Args:
            q: (T, q_heads, D), the queries.
            shared: number of parts over shared keys.
            own: number of parts over own keys.
        """
        shape = (shared + own, q.shape[1])
        values = torch.empty(*shape, q.shape[2], dtype=torch.float32, device=q.device)
        return Parts(values, torch.empty(shape, dtype=torch.float32, device=q.device), shared)


def merge_parts(
    own: OwnKeys,
    parts: Parts,
    group: int,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Merge the partial attention results of each query, and write them to its row of `out` and `lse`.

    Parts over shared keys are merged first.

    Args:
        own: the rows and their splits.
        parts: the partial results.
        group: number of query heads that one program merges.
        out: (T, q_heads, D).
        lse: (T, q_heads) float32, or None if it is not needed.
        sinks: (q_heads,), the attention sinks, or None.
    """
    heads, dim = parts.values.shape[1:]
    merge_state_kernel[(len(own.splits.places) - 1, cdiv(heads, group))](
        parts_ptr=parts.values,
        lses_ptr=parts.lses,
        sinks_ptr=sinks,
        out_ptr=out,
        lse_ptr=lse,
        rows_ptr=own.rows,
        shared_ptr=own.shared,
        places_ptr=own.splits.places,
        stride_part=parts.values.stride(0),
        stride_token=0,
        stride_head=dim,
        lse_stride_part=heads,
        lse_stride_token=0,
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        heads=heads,
        parts=0,
        first_own=parts.first_own,
        unit=1.0,
        D=dim,
        D_PAD=padded_dim(dim),
        GROUP=group,
        ROWS=next_power_of_2(group),
        num_warps=4,
        enable_fp_fusion=False,
    )
