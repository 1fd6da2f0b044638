"""Compiled operators for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, HeadTurn, LayerCache, Windows
from batchinfer.models.ops.cpu_layer import CompiledLayer, ItemPlan
from batchinfer.models.ops.cpu_linear import (
    CompiledAdapters,
    CompiledExperts,
    CompiledHead,
    CompiledHeads,
    CompiledLinear,
    pack_experts,
)
from batchinfer.models.ops.layers import (
    AdapterRoom,
    Adapters,
    CodedWeight,
    DecoderLayer,
    Experts,
    ExpertWeights,
    Factors,
    Head,
    HeadsLinear,
    LayerParts,
    Linear,
    RoundedWeight,
    Weight,
    values_of,
    write_result,
)
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec.spec import CacheSpec, LayerSpec
from batchinfer_kernels.arithmetic import WeightCodes, WeightForm
from batchinfer_kernels.cpu.attention_plan import MAX_ROWS, attention_items, whole_items
from batchinfer_kernels.cpu.compiled import MAX_HEAD_DIM, CompiledOperators
from batchinfer_kernels.cpu.memory import zeros_in_huge_pages
from batchinfer_kernels.cpu.packed import Kind, PackedWeight
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.paged_attention import ScoreRules

# Heads that read a tile of latents together: with them it is worth its way from the L2 cache
MOST_SLICE = 16
GATES: dict[Activation, Kind] = {
    "silu": "gated",
    "gelu_tanh": "gelu_gated",
    "clamped_swiglu": "clamped_gated",
    "gelu": "exact_gelu_gated",
}
# Those that need no gate
CURVES: dict[Activation, Kind] = {"silu": "silu", "gelu_tanh": "gelu", "gelu": "exact_gelu"}


class CpuOps(TorchOps):
    """`group` is the model's number of query heads a KV head; `latent`: whether what its cache keeps are latents.

    Every operator gives a row results that depend on that row alone, bit by bit. `dtype`: what the model is computed
    in, for the name of what is done; `causal` as for TorchOps.
    """

    name = "cpu"

    def __init__(
        self,
        compiled: CompiledOperators,
        group: int,
        latent: bool = False,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
    ) -> None:
        super().__init__(causal)
        self._compiled, self._latent = compiled, latent
        self._group = _slice(group) if latent else group
        self._dtype = dtype
        self._most_rows = MAX_ROWS if latent else compiled.most_rows

    @staticmethod
    def can_run(dtype: torch.dtype, group: int, head_dim: int, latent: bool = False) -> bool:
        """Whether the compiled operators cover a model."""
        sizes = latent or (group <= MAX_ROWS and head_dim <= MAX_HEAD_DIM)
        return dtype in (torch.float32, torch.bfloat16) and sizes

    def linear(self, codes: WeightCodes | None) -> str:
        way = codes or "compiled"
        tiles = self._compiled.has_tiles and (way in ("int8", "int4") or self._dtype == torch.bfloat16)
        return f"{way}, in tiles" if tiles else way

    def round_weight(self, weight: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
        if form.codes == "int8" and weight.dtype in (torch.float32, torch.bfloat16):
            return self._compiled.round_int8(weight)
        return super().round_weight(weight, form)

    def quantize(self, weight: Tensor, form: WeightForm) -> CodedWeight | RoundedWeight:
        return RoundedWeight(weight, form) if self._rounds(weight, form) else super().quantize(weight, form)

    def quantize_experts(self, weights: ExpertWeights, form: WeightForm) -> ExpertWeights:
        if self._rounds(weights.weight, form):
            return replace(weights, form=form)
        return super().quantize_experts(weights, form)

    def _rounds(self, weight: Tensor, form: WeightForm) -> bool:
        """Whether weights like this one are quantised while they are packed."""
        if form.codes == "int4":
            return self._compiled.rounds_int4(weight, form.group)
        return form.codes == "int8" and weight.dtype in (torch.float32, torch.bfloat16)

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return CompiledLinear(self._compiled, self._packed(weight, bias, "plain"))

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        return CompiledLinear(self._compiled, self._packed(weight, bias, GATES[activation]))

    def pack_activated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        if activation not in CURVES:
            # Gated experts require a gate and an up projection, as the message says
            return super().pack_activated(weight, bias, activation)
        return CompiledLinear(self._compiled, self._packed(weight, bias, CURVES[activation]))

    def pack_head(self, weight: Weight) -> Head:
        return CompiledHead(self._compiled, self._packed(weight, None, "float"))

    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return CompiledLinear(self._compiled, self._compiled.pack_linear(weight, bias, "float"))

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        into = pack_experts(self._compiled, gate_up, GATES[activation])
        back = pack_experts(self._compiled, down, "plain")
        return CompiledExperts(self._compiled, into, back)

    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        return CompiledAdapters(self._compiled, factors, None if room is None else room.places)

    def _packed(self, weight: Weight, bias: Tensor | None, kind: Kind) -> PackedWeight:
        if isinstance(weight, RoundedWeight):
            if weight.form.codes == "int8":
                return self._compiled.pack_rounded_int8(weight.values, bias, kind)
            return self._compiled.pack_rounded_int4(weight.values, weight.form.group, bias, kind)
        if not isinstance(weight, CodedWeight):
            return self._compiled.pack_linear(values_of(weight, self.name), bias, kind)
        if weight.mxfp4:
            return self._compiled.pack_mxfp4(weight.codes, weight.scales, bias, kind)
        if weight.group:
            parts = weight.codes, weight.scales, weight.zeros, weight.group
            return self._compiled.pack_int4(*parts, bias, kind)
        if weight.codes.dtype != torch.int8:
            raise TypeError(f"a CPU's operators have no products of {weight.codes.dtype}")
        return self._compiled.pack_codes(weight.codes, weight.scales, bias, kind)

    def fuse(self, spec: LayerSpec, parts: LayerParts) -> DecoderLayer | None:
        covered = CompiledLayer.covers(spec, parts, self._compiled.layer_widens(self._dtype))
        return CompiledLayer(self._compiled, spec, parts) if covered else None

    def supports_cache(self, cache: CacheSpec) -> bool:
        """Whether these operators have such a cache: one in int8 where the compiled operators were asked for it, none
        in fp8, and none of quantised latents."""
        codes = cache.dtype == "int8" and not cache.latent and self._compiled.keeps_codes
        return cache.dtype is None or codes

    def cache_shape(self, cache: CacheSpec, block_size: int) -> tuple[int, int, int]:
        if cache.latent:
            return super().cache_shape(cache, block_size)
        return self._compiled.cache_shape(cache.heads, block_size, cache.dim)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return zeros_in_huge_pages(shape, dtype)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return self._compiled.rms_norm(x, weight, eps, residual, offset)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        return self._compiled.rope_store(
            q,
            k,
            v,
            turn.rope.cos,
            turn.rope.sin,
            inputs.positions,
            cache.k,
            cache.v,
            cache.block_size,
            inputs.slots,
            turn.q_norm,
            turn.k_norm,
            turn.eps,
            offset=turn.offset,
            interleaved=turn.rope.interleaved,
            scales=cache.scales,
        )

    def rope(self, q: Tensor, turn: HeadTurn, inputs: AttentionInputs) -> Tensor:
        return self._compiled.rope(
            q,
            turn.rope.cos,
            turn.rope.sin,
            inputs.positions,
            turn.q_norm,
            turn.eps,
            offset=turn.offset,
            interleaved=turn.rope.interleaved,
        )

    def copy_parts(self, cache: LayerCache, parts: Tensor) -> None:
        if self._latent:
            super().copy_parts(cache, parts)
        else:
            self._compiled.copy_parts(cache.k, cache.v, parts, cache.scales, self._dtype)

    @property
    def follows_trees(self) -> bool:
        return self._causal and not self._latent

    def move_slots(self, cache: LayerCache, moves: Tensor) -> None:
        self._compiled.move_slots(cache.k, cache.v, cache.block_size, moves, cache.scales, self._dtype)

    def plan_attention(
        self, inputs: AttentionInputs, block_size: int, windows: Windows, beside: AttentionPlan | None = None
    ) -> AttentionPlan:
        before = beside if isinstance(beside, ItemPlan) else None
        queries, contexts = inputs.query_lens, inputs.context_lens
        self.check_tree(inputs, windows)
        if not self._causal:
            return ItemPlan(inputs, whole_items(queries, self._group, self._most_rows), before)
        if inputs.whole:
            tables, compiled = inputs.block_tables.numpy(), self._compiled
            pages = (
                compiled.latent_pages(block_size, self._dtype) if self._latent else compiled.pages(block_size)
            )
            items = attention_items(
                queries, contexts, self._group, tables, pages, self._most_rows, inputs.tree
            )
            return ItemPlan(inputs, items, before)
        # Tables of a window do not show what sequences share: entries that it has left are alike in all of them
        if before is not None and not before.inputs.whole:
            return ItemPlan(inputs, before.items, before)
        items = attention_items(queries, contexts, self._group, most_rows=self._most_rows)
        return ItemPlan(inputs, items, before)

    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        attended = self._compiled.paged_attention(
            q,
            cache.k,
            cache.v,
            cache.block_size,
            plan.inputs.block_tables,
            plan.items,
            rules,
            scales=cache.scales,
        )
        return write_result(attended, out)

    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        return CompiledHeads(self._compiled, pack_experts(self._compiled, weights, "plain"))

    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        tables = plan.inputs.block_tables
        return self._compiled.latent_attention(q, cache.k, tables, plan.items, scale, rank)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if weight.dim() > 1 or weight.dtype != x.dtype:
            return super().layer_norm(x, weight, bias, eps, residual)
        return self._compiled.layer_norm(x, weight, bias, eps, residual)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return self._compiled.gate(gate_up, GATES[activation])

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        if activation not in CURVES:
            return super().activation(x, activation)  # which says that it needs a gate and an up
        return self._compiled.activate(x, CURVES[activation])

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        self._compiled.cap_logits(logits, cap)
        return logits

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        self._compiled.mask(logits, rows, bits)

    def masked_argmax(self, logits: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        return self._compiled.masked_argmax(logits, bits)


def _slice(heads: int) -> int:
    """Return how many heads read a tile of latents together: the largest divisor of `heads` up to MOST_SLICE."""
    return max(n for n in range(1, MOST_SLICE + 1) if heads % n == 0)
