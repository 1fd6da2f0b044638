"""Steps of attention: caches whose unused slots are poisoned, and their computation by compiled operators."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from batchinfer_kernels.cpu.attention_plan import attention_items, whole_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.paged_attention import AttentionGroup, SequenceShape, build_group, group_sequences
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.latent_attention import latent_attention_reference
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from batchinfer_kernels.rope_store import quantize_heads_reference
from tests.kernels.cpu_cache import codes_laid_out, laid_out
from tests.kernels.cpu_kit import threads_of

Chunks = list[tuple[int, int]]  # queries per sequence, and its context including them


def rules_of(scale: float, window: int | None, named: dict[str, Any]) -> ScoreRules:
    """Remove the rules of scores from named arguments, and return them."""
    return ScoreRules(scale, window, *(named.pop(name, None) for name in ("soft_cap", "sinks", "bias")))


@dataclass(frozen=True)
class Step:
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    chunks: Chunks
    scales: tuple[Tensor, Tensor] | None = None  # scales of quantised caches

    @property
    def queries(self) -> list[int]:
        return [queries for queries, _ in self.chunks]

    @property
    def contexts(self) -> list[int]:
        return [context for _, context in self.chunks]

    def to(self, dtype: torch.dtype, codes: bool = False, code_dtype: torch.dtype = torch.int8) -> Self:
        """Return this step with values of a dtype. `codes`: with quantised caches."""
        if not codes:
            return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))
        (k, k_scale), (v, v_scale) = coded(self.k, code_dtype), coded(self.v, code_dtype)
        return replace(self, q=self.q.to(dtype), k=k, v=v, scales=(k_scale, v_scale))

    def attend(
        self,
        compiled: CompiledOperators,
        window=None,
        share=True,
        causal=True,
        most_rows=None,
        tree=None,
        **rules,
    ) -> Tensor:
        size, group = self.k.shape[2], self.q.shape[1] // self.k.shape[1]
        pages = (self.table.numpy(), compiled.pages(size)) if share else ()
        most: dict[str, Any] = {"most_rows": most_rows or compiled.most_rows}
        if causal:
            most["tree"] = tree
            items, scales = attention_items(self.queries, self.contexts, group, *pages, **most), None
        else:
            items, scales = whole_items(self.queries, group, **most), None
        if self.scales is None:
            k, v = laid_out(compiled, self.k, self.v)
        else:
            k, v, scales = codes_laid_out(compiled, self.k, self.v, self.scales, self.q.element_size())
        return compiled.paged_attention(
            self.q, k, v, size, self.table, items, rules_of(0.3, window, rules), scales=scales
        )

    def reference(self, window=None, **more) -> Tensor:
        k_scale, v_scale = self.scales or (None, None)
        caches = (self.k, self.v, self.table, self.queries, self.contexts)
        return paged_attention_reference(
            self.q, *caches, rules_of(0.3, window, more), k_scale=k_scale, v_scale=v_scale, **more
        )

    def leave_behind(self, window: int | None) -> None:
        """Poison blocks outside the window of each chunk's first query, and replace them in the tables."""
        for row, (queries, context) in enumerate(self.chunks):
            seen = 0 if window is None else max(0, context - queries - window + 1)
            left = self.table[row, : seen // self.k.shape[2]]
            for tensor in self.scales or (self.k, self.v):
                tensor[left.long()] = float("nan")
            left[:] = self.table[row, 0]

    def part(self, row: int, first: int, count: int) -> Self:
        """Return the step of queries [first, first + count) of one sequence."""
        queries, context = self.chunks[row]
        start = sum(self.queries[:row]) + first
        chunks = [(count, context - queries + first + count)]
        return replace(self, q=self.q[start : start + count], table=self.table[row : row + 1], chunks=chunks)

    def groups(
        self, window: int | None = None, causal: bool = True, tree: TreeMask | None = None
    ) -> list[AttentionGroup]:
        """Return groups of sequences in the form of torch's operators."""
        shapes = [
            SequenceShape(row, sum(self.queries[:row]), queries, context)
            for row, (queries, context) in enumerate(self.chunks)
        ]
        size, windows = self.k.shape[2], frozenset({window})
        groups = group_sequences(shapes, causal)
        return [build_group(group, self.table, size, windows, causal, tree) for group in groups]


@dataclass(frozen=True)
class LatentStep(Step):
    """A step over a cache of latents, which is `k`. `rank`: the first values of a latent, which are V."""

    rank: int = 0

    def attend(self, compiled: CompiledOperators, window=None, share=True, heads=None) -> Tensor:
        """Compute the step. `heads`: heads per work item, by default all."""
        pages = (self.table.numpy(), compiled.latent_pages(self.k.shape[2], self.q.dtype)) if share else ()
        items = attention_items(self.queries, self.contexts, heads or self.q.shape[1], *pages)
        return compiled.latent_attention(self.q, self.k, self.table, items, 0.3, self.rank)

    def reference(self) -> Tensor:
        step = (self.k, self.table, self.queries, self.contexts)
        return latent_attention_reference(self.q, *step, 0.3, self.rank)


def coded(values: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return quantised values and their scales, [blocks, heads, block_size].

    Args:
        values: [blocks, heads, block_size, D]. Unwritten NaN slots get a scale of NaN, and the largest value
            or NaN.
    """
    codes, scales = quantize_heads_reference(values.flatten(0, 1), dtype)
    poison = 127 if dtype == torch.int8 else float("nan")
    codes = codes.float().masked_fill(values.isnan().flatten(0, 1), poison).to(dtype)
    return codes.view(values.shape), scales.view(values.shape[:3])


def poisoned_step(
    seed: int, heads: int, kv_heads: int, dim: int, block_size: int, chunks: Chunks, pad: int = 0
) -> Step:
    """Return a step of random values. Unused slots of the caches are NaN. `pad`: padding of the tables."""
    torch.manual_seed(seed)
    tables = [-(-context // block_size) for _, context in chunks]
    total = sum(tables) + 3
    caches = [torch.full((total, kv_heads, block_size, dim), float("nan")) for _ in range(2)]
    free = list(range(total))
    random.Random(seed).shuffle(free)
    table = torch.full((len(chunks), max(*tables, 0) + 1), pad, dtype=torch.int32)
    for row, (_, context) in enumerate(chunks):
        for i in range(tables[row]):
            table[row, i] = block = free.pop()
            used = min(block_size, context - i * block_size)
            for cache in caches:
                cache[block, :, :used] = torch.randn(kv_heads, used, dim)
    return Step(torch.randn(sum(n for n, _ in chunks), heads, dim), *caches, table, chunks)


def latent_step(seed: int, heads: int, rank: int, turned: int, block_size: int, chunks: Chunks) -> LatentStep:
    """Return a step over latents, whose last `turned` values are rotated, after the first `rank` ones."""
    return LatentStep(**vars(poisoned_step(seed, heads, 1, rank + turned, block_size, chunks)), rank=rank)


def tree_step(
    seed: int, kv_heads: int, group: int, dim: int, block_size: int, children, depths, own, few=(1,)
) -> Step:
    """Return a step whose block tables form a tree.

    Args:
        depths: number of blocks per level; own blocks follow.
        few: number of queries of the sequences in turn, at most their tokens.
    """
    generator, fresh, paths = torch.Generator().manual_seed(seed), iter(range(10_000)), [()]
    for blocks in depths:
        paths = [
            (*path, *shared)
            for path in paths
            for shared in [[next(fresh) for _ in range(blocks)] for _ in range(children)]
        ]
    rows = [(*path, *(next(fresh) for _ in range(own))) for path in paths for _ in range(children)]
    order = torch.randperm(len(rows), generator=generator).tolist()
    table = torch.tensor([rows[i] for i in order], dtype=torch.int32)
    shape = (int(table.max()) + 1, kv_heads, block_size, dim)
    caches = [torch.randn(shape, generator=generator) for _ in range(2)]
    last = table.shape[1] * block_size
    lengths = [last - i % min(own * block_size, 7) for i in range(len(rows))]
    chunks = [
        (min(few[i % len(few)], length), length) for i, length in enumerate(lengths)
    ]  # a query attends at least to itself
    q = torch.randn(sum(n for n, _ in chunks), kv_heads * group, dim, generator=generator)
    return Step(q, *caches, table, chunks)


def assert_rows_are_their_own(step: Step, compiled: CompiledOperators) -> None:
    """Assert equal bits of rows in whole or chunked prompts, in any batch, and with one or two threads."""
    whole = step.attend(compiled)
    for threads in (1, 2):
        with threads_of(threads):
            for row, queries in enumerate(step.queries):
                start = sum(step.queries[:row])
                for size in {1, 5, 6, 17, 32, queries - 1} if queries > 40 else {queries}:
                    for first in range(0, queries, size):
                        part = step.part(row, first, min(size, queries - first))
                        wanted = whole[start + first : start + first + len(part.q)]
                        assert torch.equal(part.attend(compiled), wanted), (row, first, size)
