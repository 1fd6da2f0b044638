"""The functions that kernels over logits share. A row is read in chunks of fixed size, regardless of other rows.

One program per chunk takes the maximum, so a few long rows fill a GPU. Chunks and their results do not depend on the
number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.checks import FLOATS, unit_columns
from batchinfer_kernels.gpu.sizes import cdiv

# Logits per program: 8 loads of 16 bytes per thread with 4 warps, for float32
CHUNK = 4096


@triton.jit
def row_chunk(row_ptr, at, vocab):
    """Load a row's logits of the tokens `at`, in float32; -inf for token ids from `vocab` on."""
    return tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def best_of(values, ids):
    """Return (greatest value, lowest id with this value). The value is NaN if any value is NaN."""
    broken = tl.max((values != values).to(tl.int32), 0)
    numbers = tl.where(values != values, float("-inf"), values)
    best = tl.max(numbers, 0)
    first = tl.min(tl.where(numbers == best, ids, 2147483647), 0)
    return tl.where(broken > 0, float("nan"), best), first


@triton.jit
def is_finite(x):
    """Return True if x is neither infinite nor NaN."""
    return x - x == 0.0


@triton.jit
def _chunk_best_kernel(logits_ptr, stride, vocab, best_ptr, at_ptr, sum_ptr, CHUNK: tl.constexpr):
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = row_chunk(logits_ptr + row * stride, ids, vocab)
    best, first = best_of(x, ids)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(at_ptr + row * chunks + chunk, first)
    if sum_ptr is not None:
        top = tl.where(is_finite(best), best, 0.0)  # all tokens of a chunk may be banned
        tl.store(sum_ptr + row * chunks + chunk, tl.sum(tl.exp(x - top), 0))


def chunk_best(logits: Tensor, with_sums: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the greatest logit of each chunk of CHUNK tokens, its token id, and optionally a sum for a log-softmax.

    The sum is of exp(logit - greatest logit) over the chunk, or of exp(logit) if the greatest is not finite.

    Args:
        logits: (rows, vocab).
        with_sums: False to return None instead of sums.

    Returns:
        Three tensors (rows, chunks): logits float32, token ids int32, sums float32. Of equal logits the lowest token id
        counts.
    """
    shape, device = (logits.shape[0], cdiv(logits.shape[1], CHUNK)), logits.device
    best = torch.empty(shape, dtype=torch.float32, device=device)
    ids = torch.empty(shape, dtype=torch.int32, device=device)
    sums = torch.empty_like(best) if with_sums else None
    if shape[0]:
        stride, vocab = logits.stride(0), logits.shape[1]
        _chunk_best_kernel[shape](logits, stride, vocab, best, ids, sums, CHUNK=CHUNK, num_warps=4)
    return best, ids, sums


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless logits are (rows, vocab), of a supported dtype. Rows may be strided."""
    if logits.dim() != 2 or not logits.shape[1] or logits.dtype not in FLOATS:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}, expected (rows, vocab)")
    unit_columns(logits=logits)
