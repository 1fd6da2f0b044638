"""Merges parts of attention by log-sum-exp: one kernel for splits, shared prefixes, and other uses.

Parts are folded in the order of their keys, as the prefill kernel folds segments. A row's bits do not depend on which
program computed the parts (FlashInfer's cascade, Ye et al., 2024; Hydragen, Juravsky et al., 2024).
"""

from __future__ import annotations

import triton
import triton.language as tl

from batchinfer_kernels.gpu.attention_core import (
    LN2,
    as_part,
    fold,
    initial_state,
)
from batchinfer_kernels.gpu.attention_launch import VARYING


@triton.jit(do_not_specialize=VARYING)
def merge_state_kernel(
    parts_ptr, lses_ptr, sinks_ptr, out_ptr, lse_ptr, rows_ptr, shared_ptr, places_ptr, stride_part, stride_token,
    stride_head, lse_stride_part, lse_stride_token, out_stride_token, out_stride_head, heads, parts, first_own,
    unit,
    D: tl.constexpr, D_PAD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the partial attention results of a query, for GROUP query heads per program, and write them to out and lse.

    - parts_ptr, lses_ptr: the output over each part of the keys, and its log-sum-exp. The log-sum-exp × `unit` is in
      base 2.
    - rows_ptr (T, 2): row of out and sequence of each query; None: query i has row i.
    - shared_ptr, places_ptr (T + 1,): query i has the parts shared[i] … shared[i + 1] - 1 over shared keys, then the
      parts places[i] … places[i + 1] - 1 over own keys, counted from `first_own`. shared_ptr None: no shared keys.
      Both None: each query has `parts` parts.
    - heads: number of query heads. GROUP: number of query heads of a program.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    head = kv_head * GROUP + row
    real = (row < GROUP) & (head < heads)
    cells = real[:, None] & (dim < D)[None, :]
    at = head[:, None] * stride_head + dim[None, :]
    total, top, mass = initial_state(sinks_ptr, head, real, ROWS, D_PAD)
    shared = parts
    own = 0
    first_shared = tl.cast(0, tl.int64)
    first_own = tl.cast(first_own, tl.int64)
    if places_ptr is not None:
        shared = 0
        place = tl.load(places_ptr + token)
        own = tl.load(places_ptr + token + 1) - place
        first_own += place
    if shared_ptr is not None:
        place = tl.load(shared_ptr + token)
        shared = tl.load(shared_ptr + token + 1) - place
        first_shared += place
    for index in range(0, shared + own):
        nth = tl.where(index < shared, first_shared + index, first_own + index - shared)
        lse_at = nth * lse_stride_part + token * lse_stride_token
        lse = tl.load(lses_ptr + lse_at + head, mask=real, other=float("-inf")) * unit
        filled = cells & (lse != float("-inf"))[:, None]
        part_at = nth * stride_part + token * stride_token
        part = tl.load(parts_ptr + part_at + at, mask=filled, other=0.0).to(tl.float32)
        total, top, mass = fold(total, top, mass, part, lse)
    out, lse = as_part(total, top, mass)
    if rows_ptr is not None:
        token = tl.load(rows_ptr + token * 2).to(tl.int64)
    out_at = token * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=cells)
    if lse_ptr is not None:
        tl.store(lse_ptr + token * heads + head, lse * LN2, mask=real)
