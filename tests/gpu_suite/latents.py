"""Attention over latents with the head sizes of DeepSeek's models: rows that decode, one long row, and prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import ExpertWeights, LatentHeads
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps, TritonPlan
from batchinfer_kernels.cost import Cost, LatentSizes, decompressed_attention_cost, latent_attention_cost
from batchinfer_kernels.gpu.attention_plan import AttentionShape, plan_attention
from tests.gpu_suite.case import DTYPE, TOLERANCE, Case, part, random
from tests.suite.section import BenchSection, Part

SIZES, SMALL = LatentSizes(512, 128, 64, 128), LatentSizes(40, 12, 8, 10)
FEW_HEADS, MANY_HEADS = 16, 128  # as in DeepSeek-V2-Lite and DeepSeek-V3
BLOCK, SCALE = 16, 0.07
# heads, rows, queries, context
CASES = (
    (FEW_HEADS, 256, 1, 2000),
    (MANY_HEADS, 256, 1, 2000),
    (MANY_HEADS, 1, 1, 16_000),
    (FEW_HEADS, 4, 2048, 2048),
    (FEW_HEADS, 4, 512, 2048),
    (MANY_HEADS, 1, 2048, 2048),
)
TINY = ((3, 2, 1, 40), (3, 1, 256, 256))


def parts(section: BenchSection) -> list[Part]:
    """Return a part a case."""
    return [part(section, latent_case, *sizes) for sizes in (TINY if section.rehearsal else CASES)]


def latent_case(section: BenchSection, heads: int, rows: int, queries: int, context: int) -> Case:
    """Return a case of attention over latents with the products of heads, compared with reading latents
    directly if it decompresses them."""
    sizes = SMALL if section.rehearsal else SIZES
    shape = AttentionShape(DTYPE, heads, 1, sizes.rank + sizes.turned, latent=True)
    weights = (
        random(section, heads, sizes.rank, sizes.plain) / sizes.rank**0.5,
        random(section, heads, sizes.value, sizes.rank) / sizes.rank**0.5,
    )
    inputs, blocks = _inputs(section, rows, queries, context)
    latents = random(section, blocks, 1, BLOCK, sizes.rank + sizes.turned)
    cache = LayerCache(latents, latents, BLOCK)
    q = random(section, rows * queries, heads, sizes.plain + sizes.turned)

    def packed(ops: Ops) -> LatentHeads:
        k, v = (ops.pack_heads(ExpertWeights(own)) for own in weights)
        return LatentHeads(k, v, sizes.rank, sizes.plain)

    def attended(ops: Ops) -> Tensor:
        plan = ops.plan_attention(inputs, BLOCK, frozenset({None}))
        return ops.latent_attention(q, cache, plan, packed(ops), SCALE)

    ops = TritonOps(shape)
    own, plan = packed(ops), ops.plan_attention(inputs, BLOCK, frozenset({None}))
    whole = TritonPlan(plan_attention(inputs.query_lens, inputs.context_lens, shape, section.device), inputs)
    others = {"latents": lambda: ops.latent_attention(q, cache, whole, own, SCALE)} if queries > 1 else {}
    return Case(
        "latent attention",
        f"{rows} × {queries} of {context}, {heads} heads",
        cost_of(sizes, heads, rows, queries, context),
        lambda: ops.latent_attention(q, cache, plan, own, SCALE),
        lambda: attended(TorchOps()),
        others,
        tolerance=2 * TOLERANCE,  # additional rounding of K and V, or of queries and results
    )


def _inputs(section: BenchSection, rows: int, queries: int, context: int) -> tuple[AttentionInputs, int]:
    """Return sequences with their own blocks, and the number of blocks."""
    each = -(-context // BLOCK)
    table = torch.arange(rows * each, device=section.device, dtype=torch.int32).view(rows, each)
    nowhere = torch.zeros(rows * queries, dtype=torch.int64, device=section.device)
    return AttentionInputs(nowhere, nowhere, table, [queries] * rows, [context] * rows), rows * each


def cost_of(sizes: LatentSizes, heads: int, rows: int, queries: int, context: int) -> Cost:
    """Return the cost of the cheaper way to compute attention, including the products of heads."""
    tokens, keys = rows * queries, rows * context
    pairs = rows * (queries * (context - queries) + queries * (queries + 1) // 2)
    if sizes.is_decompressing_cheaper(queries, context):
        made = Cost(heads * sizes.made * keys, 0)
        return made + decompressed_attention_cost(tokens, pairs, keys, heads, sizes, 2)
    taken = Cost(heads * sizes.made * tokens, 0)
    width = sizes.rank + sizes.turned
    return taken + latent_attention_cost(tokens, pairs, keys, heads, width, sizes.rank, 2)
