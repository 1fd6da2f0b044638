"""Token masks, applied to logits in place. Cost: batchinfer_kernels.cost.mask_cost."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gpu.row_chunks import check_logits
from batchinfer_kernels.gpu.sizes import cdiv
from batchinfer_kernels.mask import check_mask

# Logits per program: 4 stores of 16 bytes per thread with 4 warps, for float32
TILE = 2048


@triton.jit
def _mask_kernel(logits_ptr, stride, vocab, rows_ptr, bits_ptr, words, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(bits_ptr + index * words + ids // 32, mask=ids < vocab, other=-1)
    masked = (ids < vocab) & (((word >> (ids % 32)) & 1) == 0)
    logits_ptr += tl.load(rows_ptr + index).to(tl.int64) * stride
    nothing = tl.full((TILE,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + ids, nothing, mask=masked)


def mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that token masks exclude to -inf, in place.

    Args:
        logits: (any, vocab); rows may be strided.
        rows: (n,) int32, the rows of `logits` to mask.
        bits: (n, ceil(vocab / 32)) int32, a mask per row; token t is excluded if bit t % 32 of word t // 32 is 0.
    """
    check_mask(logits, rows, bits)
    check_logits(logits)
    vocab = logits.shape[1]
    if len(rows):
        grid = (len(rows), cdiv(vocab, TILE))
        _mask_kernel[grid](logits, logits.stride(0), vocab, rows, bits, bits.shape[1], TILE=TILE, num_warps=4)
