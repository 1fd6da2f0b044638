"""A random paged KV cache with shuffled blocks, and a contiguous copy of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CODE_SCALE = {"int8": 1 / 32, "float8_e4m3fn": 1.0}


@dataclass(frozen=True, slots=True)
class Heads:
    q: int
    kv: int
    dim: int
    block: int  # tokens per block

    def __str__(self) -> str:
        return f"heads of {self.dim}"

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)


@dataclass(frozen=True, slots=True)
class Paged:
    """A paged KV cache.

    Attributes:
        k, v: [blocks, kv, block, dim].
        table: [sequences, maximum blocks], int32.
    """

    heads: Heads
    contexts: tuple[int, ...]
    k: Tensor
    v: Tensor
    table: Tensor
    scale: Tensor | None  # (blocks, kv, block) float32, for quantised caches
    dtype: torch.dtype  # dtype of queries

    @classmethod
    def random(
        cls,
        contexts: Sequence[int],
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        codes: str | None = None,
        shared_keys: int = 0,
    ) -> Paged:
        """Return normal numbers in whole blocks.

        The first `shared_keys` keys of the first sequence are common to all.
        """
        table, blocks = _table(contexts, heads.block, shared_keys // heads.block)
        shape = (blocks, heads.kv, heads.block, heads.dim)
        scale = None if codes is None else torch.full(shape[:3], CODE_SCALE[codes], device=device)
        k, v = (_values(shape, dtype, device, codes) for _ in range(2))
        return cls(heads, tuple(contexts), k, v, table.to(device), scale, dtype)

    def queries(self, count: int) -> Tensor:
        """Return random queries (count, q heads, dim)."""
        shape = (count, self.heads.q, self.heads.dim)
        return torch.randn(shape, device=self.k.device).to(self.dtype)

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """Return k and v as (sequences, kv, context, dim). All contexts must have equal lengths."""
        return _gathered(self.k, self), _gathered(self.v, self)


def _gathered(cache: Tensor, paged: Paged) -> Tensor:
    pages = cache[paged.table.long()]  # (sequences, blocks, kv, block, dim)
    return pages.transpose(1, 2).flatten(2, 3)[:, :, : paged.contexts[0]].contiguous()


def _table(contexts: Sequence[int], block: int, shared: int) -> tuple[Tensor, int]:
    """Return block tables and the number of blocks. All sequences share their first `shared` blocks."""
    counts = [-(-context // block) for context in contexts]
    own = sum(counts) - shared * (len(counts) - 1)
    order = torch.randperm(own, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    table[:, :shared], at = order[:shared], shared
    for row, count in enumerate(counts):
        table[row, shared:count] = order[at : at + count - shared]
        at += count - shared
    return table, own


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, codes: str | None) -> Tensor:
    if codes == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    values = torch.randn(shape, dtype=dtype, device=device)
    return values if codes is None else values.to(getattr(torch, codes))
