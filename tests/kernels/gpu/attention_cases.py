"""What the tests of attention share: paged caches with poison around what may be read, the kernels as functions of such
a case, and launches for the compiler."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_plan import AttentionShape, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.attention_splits import Splits, Splitter
from batchinfer_kernels.gpu.decode_attention import decode_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from batchinfer_kernels.paged_attention import paged_attention_lse_reference
from batchinfer_kernels.rope_store import coded_reference

SCALE = 0.2
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

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self.contexts, dtype=torch.int32, device=self.q.device)

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.q.dtype, self.q.shape[1], self.k.shape[1], self.q.shape[2])

    def outputs(self) -> dict[str, Tensor]:
        """Poisoned places for the values and the log-sum-exps."""
        lse = torch.full(self.q.shape[:2], float("nan"), device=self.q.device)
        return {"out": torch.full_like(self.q, float("nan")), "lse": lse}

    def reference(self, window=None, sinks=None, **extras) -> tuple[Tensor, Tensor]:
        """Return values and log-sum-exps. A query of a sequence without keys, which is padding, gets 0 and its sink."""
        real = torch.tensor([context > 0 for n, context in self.chunks for _ in range(n)], dtype=torch.bool)
        out, lse = torch.zeros_like(self.q), self.outputs()["lse"]
        lse[:] = float("-inf") if sinks is None else sinks
        queries = [n if context else 0 for n, context in self.chunks]
        q, *caches = self.tensors
        out[real], lse[real] = paged_attention_lse_reference(
            q[real], *caches, queries, self.contexts, SCALE, window, sinks=sinks, **self.scales, **extras
        )
        return out, lse


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


def left_behind(case: Case, window: int) -> Case:
    """Return `case` with the blocks poisoned that the window of each chunk's first query has left."""
    for row, (queries, context) in enumerate(case.chunks):
        left = case.table[row, : max(0, context - queries - window + 1) // case.k.shape[2]].long()
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
    """Return the items for single queries that share nothing. `longest`: the bound of contexts in a graph."""
    lengths = np.array(contexts, np.int64)
    splitter = Splitter(case.k.shape[1], case.q.device, deterministic, longest)
    return splitter.split(lengths, np.zeros_like(lengths), window, segment)


def prefill(case: Case, window=None, **extras) -> tuple[Tensor, Tensor]:
    outputs = case.outputs()
    prefill_attention(
        *case.tensors, case.queries, case.contexts, SCALE, window, **outputs, **case.scales, **extras
    )
    return outputs["out"], outputs["lse"]


def decode(
    case: Case, window=None, segment=None, longest=None, planned=None, deterministic=False, **extras
) -> tuple[Tensor, Tensor]:
    """`longest`: the bound of contexts in a graph; `planned`: the contexts before they grew."""
    outputs = case.outputs()
    splits = splits_of(planned or case.contexts, case, window, segment, deterministic, longest)
    decode_attention(
        *case.tensors,
        case.lengths,
        splits,
        SCALE,
        window,
        deterministic=deterministic,
        **outputs,
        **case.scales,
        **extras,
    )
    return outputs["out"], outputs["lse"]


def attend_sharing(case: Case, prefixes, window=None, **extras) -> tuple[Tensor, Tensor]:
    """`prefixes`: (sequences, keys), as `sharing` takes them."""
    outputs, shared = case.outputs(), [SharedPrefix(*p) for p in prefixes]
    plan = plan_attention(case.queries, case.contexts, case.shape, case.q.device, shared, windows=[window])
    paged_attention(*case.tensors, plan, SCALE, window, **outputs, **case.scales, **extras)
    return outputs["out"], outputs["lse"]


def check(case: Case, attend, window=None, soft_cap=None, sinks=None, **how: Any) -> None:
    """`attend`: one of the three above; `how`: its own arguments."""
    rules = {"soft_cap": soft_cap, "sinks": sinks}
    found = attend(case, window=window, **rules, **how)
    for got, wanted in zip(found, case.reference(window, **rules), strict=True):
        assert_near(got, wanted, case.q.dtype)


def assert_near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        got.float(), wanted.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=False
    )


# ---- launches for the compiler: arguments are JSON's types


def launch_prefill(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    case, extras = compiled_case(((100, 300),), dtype, dim, group, block_size, soft_cap, codes)
    prefill(case, window, deterministic=deterministic, **extras)


def launch_decode(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    """Launch decode attention with one item a row, and with several."""
    case, extras = compiled_case(((1, 300),) * 2, dtype, dim, group, block_size, soft_cap, codes)
    for planned in (300, 3000):
        decode(case, window, 512, planned=[planned] * 2, deterministic=deterministic, **extras)


def launch_prefix(dtype, dim, group, block_size, window, soft_cap, codes, deterministic) -> None:
    case, extras = compiled_case(((1, 1100), (1, 1100)), dtype, dim, group, block_size, soft_cap, codes)
    shape = replace(case.shape, deterministic=deterministic)
    prefixes = [SharedPrefix([0, 1], 1024)]
    plan = plan_attention(case.queries, case.contexts, shape, "cpu", prefixes, windows=[window])
    paged_attention(*case.tensors, plan, SCALE, window, **extras, **case.scales)


def compiled_case(chunks, dtype, dim, group, block_size, soft_cap, codes) -> tuple[Case, dict[str, Any]]:
    """Return the case, and a soft cap with sinks: few models have both, but one launch shows all that they take."""
    cache_dtype = None if codes is None else getattr(torch, codes)
    case = paged_case(chunks, 2, group, dim, block_size, getattr(torch, dtype), cache_dtype)
    return case, {"soft_cap": soft_cap, "sinks": None if soft_cap is None else torch.zeros(2 * group)}
