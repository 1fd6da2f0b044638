"""Advances the inputs of a decode step by one token, between two replays of its graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.advance_rows import StepRows, check_advance_rows
from batchinfer_kernels.gpu.checks import check_contiguous

ROWS = 128  # rows per program, one thread each


@triton.jit(do_not_specialize=["step", "rows", "block_size", "table_stride"])
def _advance_rows_kernel(
    tokens_ptr, step, firsts_ptr, repeats_ptr, tables_ptr, slots_ptr, contexts_ptr, token_ids_ptr, positions_ptr,
    rows, block_size, table_stride,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    repeats = tl.load(repeats_ptr + row, mask=inside, other=1)
    seen = tl.load(firsts_ptr + row, mask=inside, other=1) + tl.minimum(repeats - 1, step)
    last = seen - 1
    entry = row.to(tl.int64) * table_stride + last // block_size
    block = tl.load(tables_ptr + entry, mask=inside, other=0).to(tl.int64)
    tl.store(slots_ptr + row, block * block_size + last % block_size, mask=inside)
    if contexts_ptr is not None:
        tl.store(contexts_ptr + row, seen, mask=inside)
    if token_ids_ptr is not None:
        token = tl.load(tokens_ptr + row, mask=inside, other=0)
        tl.store(token_ids_ptr + row, tl.maximum(token, 0), mask=inside)
    if positions_ptr is not None:
        position = tl.load(positions_ptr + row, mask=inside, other=0)
        tl.store(positions_ptr + row, position + (repeats > step).to(tl.int64), mask=inside)


def advance_rows(tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows) -> None:
    """Write the inputs of one decode step into `kept`, as `advance_rows_reference` does.

    The host launches several such steps at once. All tensors must be contiguous.

    Args:
        tokens: (n,) int64, the tokens that the previous step sampled; negative for none.
        step: index of the step in the launch, from 0.
        firsts: (n,) int32, the number of tokens of each sequence in step 0, the newest one included.
        repeats: (n,) int32, the number of steps that each sequence needs. In further steps the sequence is computed at
            its last position again; the caller must ignore that output.
        kept: the tensors that the step reads; changed in place.
    """
    check_advance_rows(tokens, firsts, repeats, kept)
    tables, block_size, slots, contexts, token_ids, positions = kept
    check_contiguous(
        tokens=tokens, firsts=firsts, repeats=repeats, tables=tables, slots=slots, contexts=contexts,
        token_ids=token_ids, positions=positions,
    )  # fmt: skip
    if len(tokens):
        _advance_rows_kernel[(-(-len(tokens) // ROWS),)](
            tokens, step, firsts, repeats, tables, slots, contexts, token_ids, positions, len(tokens), block_size,
            tables.stride(0), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
