"""Attention over latents with the head sizes of DeepSeek's models: rows that decode, one long row, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import ExpertWeights, LatentHeads
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps, TritonPlan
from batchinfer_kernels.cost import Cost, LatentSizes, decompressed_attention_cost, latent_attention_cost
from batchinfer_kernels.gpu.attention_plan import AttentionShape, plan_attention
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.suite.section import BenchSection, Part

SIZES, SMALL = LatentSizes(512, 128, 64, 128), LatentSizes(40, 12, 8, 10)
FEW_HEADS, MANY_HEADS = 16, 128  # of DeepSeek-V2-Lite, and of -V3
BLOCK, SCALE = 16, 0.07
Chunks = Sequence[tuple[int, int]]  # queries, context


def parts(section: BenchSection) -> list[Part]:
    """Return a part a case."""
    if section.rehearsal:
        cases: list[tuple[int, Chunks]] = [(3, [(1, 40)] * 2), (3, [(300, 300)])]
    else:
        cases = [
            (FEW_HEADS, [(1, 2000)] * 256),
            (MANY_HEADS, [(1, 2000)] * 256),
            (MANY_HEADS, [(1, 16_000)]),
            (FEW_HEADS, [(2048, 2048)] * 4),
            (FEW_HEADS, [(512, 2048)] * 4),
            (MANY_HEADS, [(2048, 2048)]),
        ]
    return [_part(section, *case) for case in cases]


def _part(section: BenchSection, heads: int, chunks: Chunks) -> Part:
    queries, context = chunks[0]
    size = f"{len(chunks)} × {queries} of {context}, {heads} heads"
    return f"latents {size}", lambda: measured(section, latent_case(section, size, heads, chunks))


@dataclass(frozen=True, slots=True)
class LatentStep:
    """What a layer is given in a step."""

    q: Tensor
    cache: LayerCache
    inputs: AttentionInputs
    weights: tuple[Tensor, Tensor]

    def heads(self, ops: Ops) -> LatentHeads:
        """Pack the weights."""
        rank, plain = self.weights[0].shape[1:]
        k, v = (ops.pack_heads(ExpertWeights(own)) for own in self.weights)
        return LatentHeads(k, v, rank, plain)

    def attend(self, ops: Ops) -> Tensor:
        """Return what these operators make of it."""
        plan = ops.plan_attention(self.inputs, BLOCK, frozenset({None}))
        return ops.latent_attention(self.q, self.cache, plan, self.heads(ops), SCALE)


def latent_case(section: BenchSection, size: str, heads: int, chunks: Chunks) -> Case:
    """With the products of heads. Compared with what reads the latents themselves, where that is not what is done."""
    sizes = SMALL if section.rehearsal else SIZES
    step = made_step(section, sizes, heads, chunks)
    shape = AttentionShape(torch.bfloat16, heads, 1, sizes.rank + sizes.turned, latent=True)
    ops, (lens, contexts) = TritonOps(shape), zip(*chunks, strict=True)
    packed, plan = step.heads(ops), ops.plan_attention(step.inputs, BLOCK, frozenset({None}))
    whole = TritonPlan(plan_attention(lens, contexts, shape, section.device), step.inputs)
    call = (step.q, step.cache)
    return Case(
        "latent attention",
        size,
        cost_of(sizes, heads, chunks),
        "bfloat16",
        lambda: ops.latent_attention(*call, plan, packed, SCALE),
        lambda: distance(step.attend(ops), step.attend(TorchOps())),
        2 * TOLERANCE[torch.bfloat16],  # K and V are rounded, or queries and results in latents
        {"latents": lambda: ops.latent_attention(*call, whole, packed, SCALE)} if lens[0] > 1 else {},
    )


def made_step(section: BenchSection, sizes: LatentSizes, heads: int, chunks: Chunks) -> LatentStep:
    """Random values; sequences in blocks of their own."""
    lens, contexts = ([*of] for of in zip(*chunks, strict=True))
    blocks = [-(-context // BLOCK) for context in contexts]
    table = torch.arange(sum(blocks), device=section.device, dtype=torch.int32).view(len(chunks), -1)
    cache = _random(section, sum(blocks), 1, BLOCK, sizes.rank + sizes.turned)
    weights = (
        _random(section, heads, sizes.rank, sizes.plain),
        _random(section, heads, sizes.value, sizes.rank),
    )
    nowhere = torch.zeros(sum(lens), dtype=torch.int64, device=section.device)
    inputs = AttentionInputs(nowhere, nowhere, table, lens, contexts)
    q = _random(section, sum(lens), heads, sizes.plain + sizes.turned)
    k, v = (own / sizes.rank**0.5 for own in weights)
    return LatentStep(q, LayerCache(cache, cache, BLOCK), inputs, (k, v))


def cost_of(sizes: LatentSizes, heads: int, chunks: Chunks) -> Cost:
    """Return the cost of the way that has fewer operations, with the products of heads."""
    lens, contexts = ([*of] for of in zip(*chunks, strict=True))
    tokens, keys = sum(lens), sum(contexts)
    pairs = sum(n * (context - n) + n * (n + 1) // 2 for n, context in chunks)
    if sizes.decompressing_pays(*chunks[0]):
        made = Cost(heads * sizes.made * keys, 0)
        return made + decompressed_attention_cost(tokens, pairs, keys, heads, sizes, 2)
    taken = Cost(heads * sizes.made * tokens, 0)
    width = sizes.rank + sizes.turned
    return taken + latent_attention_cost(tokens, pairs, keys, heads, width, sizes.rank, 2)


def _random(section: BenchSection, *shape: int) -> Tensor:
    return torch.randn(shape, device=section.device).to(torch.bfloat16)
