"""Operators for the CPU: compiled ones between matrix products, packed weights within them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.ops.interface import AttentionInputs, AttentionPlan, LayerCache, Linear, RopeTable
from batchinfer.ops.torch_ops import TorchLinear, TorchOps
from batchinfer_kernels.cpu.compiled import MAX_HEAD_DIM, MAX_ROWS, CompiledOperators, attention_items
from batchinfer_kernels.gated_activation import Activation

# The batch size that a packed weight is laid out for. Of 16, 64, 128, 256 and 2048 it made no difference that could be
# told from noise for batches of 8 to 2048 (135M Llama shapes, two cores); decode batches are the usual ones.
PACKED_FOR = 128


class PackedLinear(Linear):
    """bfloat16, in oneDNN's own layout: torch's plain linear packs the weight anew at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class ItemPlan(AttentionPlan):
    """The step cut into pieces of work."""

    padded_tokens = 0

    def __init__(self, inputs: AttentionInputs, items: Tensor) -> None:
        self.inputs, self.items = inputs, items


class CpuOps(TorchOps):
    """`group` and `head_dim` are the model's: what the compiled operators cannot do is decided before they run."""

    name = "cpu"

    def __init__(self, compiled: CompiledOperators, group: int) -> None:
        self._compiled, self._group = compiled, group

    @staticmethod
    def can_run(dtype: torch.dtype, group: int, head_dim: int) -> bool:
        """Whether the compiled operators cover a model."""
        return dtype in (torch.float32, torch.bfloat16) and group <= MAX_ROWS and head_dim <= MAX_HEAD_DIM

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return PackedLinear(weight, bias)
        return TorchLinear(weight, bias)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._compiled.rms_norm(x, weight, eps, residual)

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTable,
        inputs: AttentionInputs,
        cache: LayerCache,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        places = (rope.cos, rope.sin, inputs.positions, cache.k, cache.v, inputs.slots)
        return self._compiled.rope_store(q, k, v, *places, q_norm, k_norm, eps)

    def plan_attention(
        self, inputs: AttentionInputs, block_size: int, windows: frozenset[int | None]
    ) -> AttentionPlan:
        return ItemPlan(inputs, attention_items(inputs.query_lens, inputs.context_lens, self._group))

    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        tables = plan.inputs.block_tables
        return self._compiled.paged_attention(q, cache.k, cache.v, tables, plan.items, scale, window)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return self._compiled.silu_gate(gate_up)
        return super().gated_activation(gate_up, activation)
