"""Operators that multiply quantised weights like the products' references, and logits to compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import CodedWeight, Experts, ExpertWeights, Head, Linear, Weight
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.block_fp8_matmul import BlockWeight, block_fp8_matmul_reference
from batchinfer_kernels.experts import Choice, combine_reference, group_by_expert
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference
from batchinfer_kernels.gated_activation import Activation, gated_activation_reference
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.int4_linear import int4_linear_reference
from batchinfer_kernels.quantized_linear import quantized_linear_reference
from batchinfer_kernels.quantized_matmul import int4_values, pack_int4_experts, pack_int4_weight
from tests.batchinfer.engine.small_engine import Limits, Place, make_runner
from tests.batchinfer.engine.teacher_forced import Row, forced_logits

CHUNKED = Limits(budget=32)
ROWS = (Row([3, 17, 99, 4, 200], [7, 8]), Row([5] * 20, [9, 1]))


def forced(
    model: Checkpoint, ops: Ops, device: str, limits: Limits = CHUNKED, rows: Sequence[Row] = ROWS
) -> dict[Place, Tensor]:
    """Return the logits of forced answers."""
    return forced_logits(make_runner(model, ops, limits, device), limits, rows)[0]


class ReferenceLinear(Head):
    """A linear layer computed by its reference."""

    def __init__(self, shape: Sequence[int], product: Callable[[Tensor], Tensor]) -> None:
        (self.out_features, self.in_features), self._product = shape, product

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)


def _coded(weight: CodedWeight, bias: Tensor | None) -> ReferenceLinear:
    codes, scales, lines = weight.codes, weight.scales, weight.lines

    def product(x: Tensor) -> Tensor:
        if weight.group:
            return int4_linear_reference(x, codes, scales, weight.zeros, weight.group, bias)
        if codes.dtype == torch.int8:
            return quantized_linear_reference(x, codes, scales, bias, weight.hadamard)
        if lines is None:
            return fp8_matmul_reference(x, codes, scales, bias)
        return block_fp8_matmul_reference(x, BlockWeight(codes, scales, lines), bias)

    return ReferenceLinear(codes.shape, product)


class CodedExperts(Experts):
    """Experts with int4 or fp8 weights."""

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> None:
        self._parts, self._activation = (gate_up, down), activation
        self.loads = torch.zeros(len(gate_up.weight), dtype=torch.int64, device=gate_up.weight.device)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        groups = group_by_expert(choice.experts, len(self.loads))
        rows = x[groups.order // choice.experts.shape[1]]
        into, back = self._parts
        inner = gated_activation_reference(_multiplied(rows, into, groups.starts), self._activation)
        return combine_reference(_multiplied(inner, back, groups.starts), groups.order, choice.weights)


def _multiplied(rows: Tensor, weights: ExpertWeights, starts: Tensor) -> Tensor:
    codes, scales, zeros = weights.weight, weights.scales, weights.zeros
    assert scales is not None
    if not weights.int4:
        return grouped_matmul_reference(rows, codes, starts, weights.bias, scales=scales, lines=weights.lines)
    made = rows.new_empty(len(rows), codes.shape[1])
    for expert, (first, end) in enumerate(pairwise(starts.tolist())):
        own = None if zeros is None else zeros[expert]
        made[first:end] = int4_linear_reference(
            rows[first:end], codes[expert], scales[expert], own, weights.group
        )
    return made


class CodedOps(TorchOps):
    """The torch operators, with products of quantised weights by their references."""

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return _coded(weight, bias) if isinstance(weight, CodedWeight) else super().pack_linear(weight, bias)

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        coded = gate_up.scales is not None
        return (CodedExperts if coded else super().pack_experts)(gate_up, down, activation)

    def pack_head(self, weight: Weight) -> Head:
        return _coded(weight, None) if isinstance(weight, CodedWeight) else super().pack_head(weight)


class ValueOps(TorchOps):
    """The torch operators, with int4 weights expanded to their values and int8 as the reference has it."""

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if isinstance(weight, CodedWeight):
            parts = weight.codes, weight.scales, weight.zeros, weight.group
            weight = int4_values(pack_int4_weight(*parts, torch.float32))
        return super().pack_linear(weight, bias)

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        return super().pack_experts(_widened(gate_up), _widened(down), activation)

    def pack_head(self, weight: Weight) -> Head:
        return _coded(weight, None) if isinstance(weight, CodedWeight) else super().pack_head(weight)


def _widened(weights: ExpertWeights) -> ExpertWeights:
    if weights.scales is None:
        return weights
    parts = weights.weight, weights.scales, weights.zeros, weights.group
    packed = pack_int4_experts(*parts, torch.float32)
    values = [int4_values(packed.of(expert)) for expert in range(len(weights.weight))]
    return ExpertWeights(torch.stack(values), weights.bias)
