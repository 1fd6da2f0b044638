"""What the attention tests share: poisoned paged caches, tolerances, launches for the compiler."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_splits import Splits, Splitter
from batchinfer_kernels.paged_attention import paged_attention_lse_reference
from batchinfer_kernels.rope_store import coded_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Units in the last place of the dtype, at values of about 1: weights and sums are rounded once each
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """One step: chunks are (queries, context)."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    chunks: list[tuple[int, int]]
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def queries(self) -> list[int]:
        return [n for n, _ in self.chunks]

    @property
    def contexts(self) -> list[int]:
        return [c for _, c in self.chunks]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.table

    @property
    def scales(self) -> dict[str, Tensor | None]:
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def reference(self, scale, window=None, **extras) -> tuple[Tensor, Tensor]:
        return paged_attention_lse_reference(
            *self.tensors, self.queries, self.contexts, scale, window, **self.scales, **extras
        )


def paged_case(
    chunks,
    kv_heads=2,
    group=2,
    dim=64,
    block_size=16,
    dtype=torch.float32,
    cache_dtype=None,
    seed=0,
    device="cpu",
) -> Case:
    """Random q and cache, blocks in random order; unused slots are NaN (or the largest code), tables end in -1."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in chunks]
    order = list(range(sum(counts) + 2))
    random.Random(seed).shuffle(order)
    table = torch.full((len(chunks), max(*counts, 1) + 1), -1, dtype=torch.int32)
    caches = [torch.full((len(order), kv_heads, block_size, dim), float("nan")) for _ in range(2)]
    for row, (_, context) in enumerate(chunks):
        for at in range(counts[row]):
            table[row, at] = block = order.pop()
            used = min(block_size, context - at * block_size)
            for cache in caches:
                cache[block, :, :used] = torch.randn(kv_heads, used, dim, generator=generator)
    q = torch.randn(sum(n for n, _ in chunks), kv_heads * group, dim, generator=generator).to(dtype)
    scales: list[Tensor | None] = [None, None]
    if cache_dtype is not None:
        caches, scales = zip(*(coded(cache, cache_dtype) for cache in caches), strict=True)
    else:
        caches = [c.to(dtype) for c in caches]
    moved = [t if t is None else t.to(device) for t in (q, *caches, table, *scales)]
    return Case(*moved[:4], list(chunks), *moved[4:])


def sharing(case: Case, block_size: int, prefixes: list[tuple[list[int], int]]) -> Case:
    """`case` with the first keys of some sequences in the blocks of the first of them; what these had is poisoned.

    prefixes: (sequences, keys), outer before inner ones.
    """
    for sequences, keys in prefixes:
        blocks = keys // block_size
        source = case.table[sequences[0], :blocks].clone()
        for other in sequences[1:]:
            left = case.table[other, :blocks][case.table[other, :blocks] != source].long()
            for cache in (case.k, case.v):
                cache[left] = float("nan") if cache.dtype.is_floating_point else 127
            for scale in (case.k_scale, case.v_scale):
                if scale is not None:
                    scale[left] = float("nan")
            case.table[other, :blocks] = source
    return case


def left_behind(case: Case, window: int, block_size: int = 16) -> Case:
    """`case` with the blocks poisoned that the window of each chunk's first query has left."""
    for row, (queries, context) in enumerate(case.chunks):
        left = case.table[row, : max(0, context - queries - window + 1) // block_size].long()
        for cache in (case.k, case.v):
            cache[left] = float("nan")
    return case


def coded(cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales; what is not used has scale NaN, and the largest code or NaN."""
    codes, scales = coded_reference(cache.flatten(0, 1), dtype)
    unused = cache.isnan().flatten(0, 1)
    poison = codes.float().masked_fill(unused, 127 if dtype == torch.int8 else float("nan"))
    return poison.to(dtype).view(cache.shape), scales.view(cache.shape[:3])


def splits_of(contexts, case: Case, window=None, segment=None, deterministic=False, longest=None) -> Splits:
    """Of single queries that share nothing. `longest`: of a graph."""
    lengths = np.array(contexts, np.int64)
    splitter = Splitter(case.k.shape[1], case.q.device, deterministic, longest)
    return splitter.split(lengths, np.zeros_like(lengths), window, segment)


def poisoned_like(q: Tensor) -> Tensor:
    return torch.full_like(q, float("nan"))


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=False
    )


# ---- launches for the compiler: arguments are JSON's types


def launch_prefill(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    from batchinfer_kernels.gpu.prefill_attention import prefill_attention

    case, extras = compiled_case(((100, 300),), dtype, dim, group, block_size, soft_cap, codes)
    prefill_attention(
        *case.tensors, case.queries, case.contexts, 0.1, window, **extras, deterministic=deterministic
    )


def launch_decode(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    """With one item a row, and with several."""
    from batchinfer_kernels.gpu.decode_attention import decode_attention

    case, extras = compiled_case(((1, 300),) * 2, dtype, dim, group, block_size, soft_cap, codes)
    lengths = torch.full((2,), 300, dtype=torch.int32)
    for planned in (300, 3000):
        splits = splits_of([planned] * 2, case, window, 512, deterministic)
        decode_attention(*case.tensors, lengths, splits, 0.1, window, **extras, deterministic=deterministic)


def launch_prefix(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape, SharedPrefix, plan_attention
    from batchinfer_kernels.gpu.paged_attention import paged_attention

    case, extras = compiled_case(((1, 1100), (1, 1100)), dtype, dim, group, block_size, soft_cap, codes)
    shape = AttentionShape(getattr(torch, dtype), 2 * group, 2, dim, deterministic)
    prefixes = [SharedPrefix([0, 1], 1024)]
    plan = plan_attention(case.queries, case.contexts, shape, "cpu", prefixes, windows=[window])
    paged_attention(*case.tensors, plan, 0.1, window, **extras)


def compiled_case(chunks, dtype, dim, group, block_size, soft_cap, codes):
    cache_dtype = None if codes is None else getattr(torch, codes)
    case = paged_case(chunks, 2, group, dim, block_size, getattr(torch, dtype), cache_dtype)
    sinks = (
        None if soft_cap is None else torch.zeros(2 * group)
    )  # what few models have, one launch has all of
    return case, {"soft_cap": soft_cap, "sinks": sinks, **case.scales}
