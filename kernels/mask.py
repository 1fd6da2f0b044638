"""Token masks: one bit per token of the vocabulary tells whether a row may sample the token."""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 32  # tokens per word; token t is bit t % 32, from the lowest, of word t // 32


def mask_words(vocab: int) -> int:
    """Return the number of 32-bit words of a token mask, which has one bit per token of the vocabulary."""
    return -(-vocab // BITS)


def check_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `mask_reference` accepts."""
    if logits.dim() != 2 or rows.dim() != 1 or rows.dtype != torch.int32 or bits.dtype != torch.int32:
        raise ValueError(f"logits are {tuple(logits.shape)}, rows {rows.dtype}, bits {bits.dtype}")
    if bits.shape != (len(rows), mask_words(logits.shape[1])) or not bits.is_contiguous():
        raise ValueError(
            f"bits are {tuple(bits.shape)} for {len(rows)} rows of {logits.shape[1]} logits, expected "
            f"{(len(rows), mask_words(logits.shape[1]))}, contiguous"
        )


def is_excluded(bits: Tensor, tokens: Tensor) -> Tensor:
    """Return for each token True if its token mask excludes it: (n,) bool.

    Args:
        bits: (n, words) int32, a mask per token; token t is excluded if bit t % 32 of word t // 32 is 0.
        tokens: (n,) int64, the tokens.
    """
    words = bits.gather(1, tokens[:, None] // BITS)[:, 0]
    return ((words >> (tokens % BITS)) & 1) == 0


def mask_reference(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens that token masks exclude to -inf, in place.

    Args:
        logits: (any, vocab).
        rows: (n,) int32, the rows of `logits` to mask.
        bits: (n, ceil(vocab / 32)) int32, a mask per row; token t is excluded if bit t % 32 of word t // 32 is 0.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_mask(logits, rows, bits)
    shifts = torch.arange(BITS, dtype=torch.int32, device=bits.device)
    for row, words in zip(rows.tolist(), bits, strict=True):
        allowed = (words[:, None] >> shifts).bitwise_and_(1).view(-1)[: logits.shape[1]].bool()
        logits[row].masked_fill_(~allowed, float("-inf"))
