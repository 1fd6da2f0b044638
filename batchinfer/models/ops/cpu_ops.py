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
from batchinfer_kernels.cpu.packed_weights import Kind, PackedWeight
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.paged_attention import ScoreRules

# Maximum number of heads that read a tile of latents together, to load it less often from the L2 cache
MOST_SLICE = 16
GATES: dict[Activation, Kind] = {
    "silu": "gated",
    "gelu_tanh": "gelu_gated",
    "clamped_swiglu": "clamped_gated",
    "gelu": "exact_gelu_gated",
}
# Activations that need no gate
CURVES: dict[Activation, Kind] = {"silu": "silu", "gelu_tanh": "gelu", "gelu": "exact_gelu"}


class CpuOps(TorchOps):
    """Compiled operators for the CPU. The results of a row depend only on that row, bit by bit."""

    name = "cpu"

    def __init__(
        self,
        compiled: CompiledOperators,
        group: int,
        latent: bool = False,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
    ) -> None:
        """Create the operators of a model.

        Args:
            compiled: The compiled functions.
            group: The number of query heads per KV head.
            latent: True if the KV cache stores latents.
            dtype: The dtype that the model is computed in.
            causal: False for an encoder.
        """
        super().__init__(causal)
        self._compiled, self._latent = compiled, latent
        self._group = _slice(group) if latent else group
        self._dtype = dtype
        self._most_rows = MAX_ROWS if latent else compiled.most_rows

    @staticmethod
    def can_run(dtype: torch.dtype, group: int, head_dim: int, latent: bool = False) -> bool:
        """Return True if the compiled operators support a model.

        Args:
            dtype: The dtype of activations.
            group: The number of query heads per KV head.
            head_dim: The size of a head.
            latent: True if the KV cache stores latents.
        """
        sizes = latent or (group <= MAX_ROWS and head_dim <= MAX_HEAD_DIM)
        return dtype in (torch.float32, torch.bfloat16) and sizes

    def linear(self, codes: WeightCodes | None) -> str:
        """Return the name of the method that computes linear layers, for the report, such as "int8, in tiles".

        "in tiles" means that the CPU's matrix tiles are used.

        Args:
            codes: The quantised type of most weights. None: they are floats, and the method is "compiled".
        """
        way = codes or "compiled"
        tiles = self._compiled.has_tiles and (way in ("int8", "int4") or self._dtype == torch.bfloat16)
        return f"{way}, in tiles" if tiles else way

    def round_weight(self, weight: Tensor, form: WeightForm) -> tuple[Tensor, Tensor]:
        """Quantise a float weight, and return the quantised values and float32 scales; see `Ops.round_weight`.

        Args:
            weight: (outputs, inputs).
            form: The type of the quantised values, and which values share a scale.
        """
        if form.codes == "int8" and weight.dtype in (torch.float32, torch.bfloat16):
            return self._compiled.round_int8(weight, form.hadamard)
        return super().round_weight(weight, form)

    def quantize(self, weight: Tensor, form: WeightForm) -> CodedWeight | RoundedWeight:
        """Quantise a float weight (outputs, inputs), or return a `RoundedWeight` that `pack_linear` quantises.

        Args:
            weight: The weight.
            form: The form of the quantised weight.
        """
        return RoundedWeight(weight, form) if self._rounds(weight, form) else super().quantize(weight, form)

    def quantize_experts(self, weights: ExpertWeights, form: WeightForm) -> ExpertWeights:
        """Quantise the float weights of experts, or return them with `form` set, so that `pack_experts` quantises them.

        Args:
            weights: The weights of one matrix product of all experts.
            form: The form of the quantised weights.
        """
        if self._rounds(weights.weight, form):
            return replace(weights, form=form)
        return super().quantize_experts(weights, form)

    def _rounds(self, weight: Tensor, form: WeightForm) -> bool:
        if form.codes == "int4":
            return self._compiled.rounds_int4(weight, form.group)
        return form.codes == "int8" and weight.dtype in (torch.float32, torch.bfloat16)

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a linear layer whose weight (outputs, inputs) is packed for the compiled matrix product.

        Args:
            weight: The weight, in floats or quantised.
            bias: (outputs,). None: there is none.
        """
        return CompiledLinear(self._compiled, self._pack(weight, bias, "plain"))

    def pack_gated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a layer act(gate) * up whose activation is part of the compiled product; see `Ops.pack_gated`."""
        return CompiledLinear(self._compiled, self._pack(weight, bias, GATES[activation]))

    def pack_activated(self, weight: Weight, bias: Tensor | None, activation: Activation) -> Linear:
        """Return a linear layer whose activation is part of the compiled product; see `Ops.pack_activated`.

        Raises:
            ValueError: When the layer is called, if the activation is one for gated layers only.
        """
        if activation not in CURVES:
            return super().pack_activated(weight, bias, activation)
        return CompiledLinear(self._compiled, self._pack(weight, bias, CURVES[activation]))

    def pack_head(self, weight: Weight) -> Head:
        """Return the output layer, which computes float32 logits (tokens, vocab) from its weight (vocab, inputs)."""
        return CompiledHead(self._compiled, self._pack(weight, None, "float"))

    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a linear layer with float32 results and an unquantised weight (outputs, inputs), such as a router."""
        return CompiledLinear(self._compiled, self._compiled.pack_linear(weight, bias, "float"))

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Return the experts of a layer, packed for the compiled matrix products; see `Ops.pack_experts`."""
        into = pack_experts(self._compiled, gate_up, GATES[activation])
        back = pack_experts(self._compiled, down, "plain")
        return CompiledExperts(self._compiled, into, back)

    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        """Return A and B of LoRA adapters, packed for one matrix product.

        Args:
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            room: How many adapters steps can use at the same time. `Adapters.place` selects them. None: all adapters.
        """
        return CompiledAdapters(self._compiled, factors, None if room is None else room.places)

    def _pack(self, weight: Weight, bias: Tensor | None, kind: Kind) -> PackedWeight:
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
            raise TypeError(f"the operators of a CPU do not multiply {weight.codes.dtype}")
        return self._compiled.pack_codes(weight.codes, weight.scales, bias, kind, weight.hadamard)

    def fuse(self, spec: LayerSpec, parts: LayerParts) -> DecoderLayer | None:
        """Return a layer that is computed by one call of compiled code; None if the compiled code does not support it.

        Args:
            spec: The specification of the layer.
            parts: Its packed weights.
        """
        covered = CompiledLayer.covers(spec, parts, self._compiled.layer_widens(self._dtype))
        return CompiledLayer(self._compiled, spec, parts) if covered else None

    def supports_cache(self, cache: CacheSpec) -> bool:
        """Return True for an unquantised cache, and for int8 K and V if the compiled code supports them."""
        codes = cache.dtype == "int8" and not cache.latent and self._compiled.keeps_codes
        return cache.dtype is None or codes

    def cache_shape(self, cache: CacheSpec, block_size: int) -> tuple[int, int, int]:
        """Return the shape of one block of K or V in one layer, (heads, block_size, dim).

        The block size and dim are rounded up as the compiled code requires.
        """
        if cache.latent:
            return super().cache_shape(cache, block_size)
        return self._compiled.cache_shape(cache.heads, block_size, cache.dim)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Allocate a zero-filled tensor in huge pages of the host's memory.

        Args:
            shape: The shape.
            dtype: The dtype.
            device: Not used.
        """
        return zeros_in_huge_pages(shape, dtype)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of x + residual, x + residual), each like x.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            eps: A number to add to the mean square.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
            offset: A number to add to the weight, such as Gemma's 1.
        """
        return self._compiled.rms_norm(x, weight, eps, residual, offset)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        """Norm and rotate q and k as `turn` states, write k and v to the cache, and return the rotated q.

        q, k and v are (tokens, heads, head size).
        """
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
        """Return normed and rotated q, (tokens, query heads, head size), without writing to a cache; see `Ops.rope`."""
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
        """Copy K and V of tokens from one block of the cache to the same offsets of another block.

        Args:
            cache: The cache of the layer.
            parts: (n, 4) int64, one copy per row: source block, target block, first offset, end offset.
        """
        if self._latent:
            super().copy_parts(cache, parts)
        else:
            self._compiled.copy_parts(cache.k, cache.v, parts, cache.scales, self._dtype)

    @property
    def follows_trees(self) -> bool:
        """Return True if steps may contain draft trees: for a decoder whose cache does not store latents."""
        return self._causal and not self._latent

    def move_slots(self, cache: LayerCache, moves: Tensor) -> None:
        """Move K and V of tokens within the cache.

        Args:
            cache: The cache of the layer.
            moves: (n, 2) int64, source and target slot of each token.
        """
        self._compiled.move_slots(cache.k, cache.v, cache.block_size, moves, cache.scales, self._dtype)

    def plan_attention(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: Windows,
        other_group: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Divide a step's attention into work items, for all layers of a cache group; see `Ops.plan_attention`."""
        before = other_group if isinstance(other_group, ItemPlan) else None
        queries, contexts = inputs.query_lens, inputs.context_lens
        self.check_tree(inputs, windows)
        if not self._causal:
            return ItemPlan(inputs, whole_items(queries, self._group, self._most_rows), before)
        if inputs.keeps_all:
            tables, compiled = inputs.block_tables.numpy(), self._compiled
            pages = (
                compiled.latent_pages(block_size, self._dtype) if self._latent else compiled.pages(block_size)
            )
            items = attention_items(
                queries, contexts, self._group, tables, pages, self._most_rows, inputs.tree
            )
            return ItemPlan(inputs, items, before)
        # Tables of a window do not show shared prefixes: entries before the window are equal in all tables
        if before is not None and not before.inputs.keeps_all:
            return ItemPlan(inputs, before.items, before)
        items = attention_items(queries, contexts, self._group, most_rows=self._most_rows)
        return ItemPlan(inputs, items, before)

    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        """Return the result of attention over cached K and V, (tokens, query heads, head size); see `Ops.attention`.

        Raises:
            TypeError: The plan was made by other operators.
        """
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
        """Return a linear layer with a matrix of its own for each attention head, packed for the compiled product.

        Args:
            weights: The matrices (heads, outputs, inputs).
        """
        return CompiledHeads(self._compiled, pack_experts(self._compiled, weights, "plain"))

    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        """Return the attention-weighted sums of cached latents, (tokens, heads, rank).

        Args:
            q: (tokens, heads, rank + R), queries multiplied by the weights of K, and R rotated values.
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            scale: The factor of scores.
            rank: The number of values of a latent.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        tables = plan.inputs.block_tables
        return self._compiled.latent_attention(q, cache.k, tables, plan.items, scale, rank)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (LayerNorm of x + residual, x + residual), each like x.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            bias: (hidden,). None: there is none.
            eps: A number to add to the variance.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
        """
        if weight.dim() > 1 or weight.dtype != x.dtype:
            return super().layer_norm(x, weight, bias, eps, residual)
        return self._compiled.layer_norm(x, weight, bias, eps, residual)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return act(gate) * up, (tokens, size).

        Args:
            gate_up: (tokens, 2 * size), gate before up.
            activation: The activation of gate.
        """
        return self._compiled.gate(gate_up, GATES[activation])

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        """Return the activation of each value of x (tokens, size).

        Raises:
            ValueError: The activation is one for gated layers only.
        """
        if activation not in CURVES:
            return super().activation(x, activation)  # raises the ValueError
        return self._compiled.activate(x, CURVES[activation])

    def cap_logits(self, logits: Tensor, cap: float) -> Tensor:
        """Replace logits by cap * tanh(logits / cap), in place, and return them.

        Args:
            logits: (n, vocab) float32.
            cap: The soft cap.
        """
        self._compiled.cap_logits(logits, cap)
        return logits

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: (any, vocab).
            rows: (n,) int32, the rows to mask.
            bits: (n, ceil(vocab / 32)) int32, a bit per token, 1 if it is allowed.
        """
        self._compiled.mask(logits, rows, bits)

    def masked_argmax(self, logits: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's allowed token with the largest logit, and whether the row's most likely token is forbidden.

        Args:
            logits: (n, vocab), which may be changed.
            bits: (n, ceil(vocab / 32)) int32, a bit per token, 1 if it is allowed.

        Returns:
            Tokens (n,) int64, and (n,) bool: True if the token with the largest logit of all is forbidden.
        """
        return self._compiled.masked_argmax(logits, bits)


def _slice(heads: int) -> int:
    return max(n for n in range(1, MOST_SLICE + 1) if heads % n == 0)
