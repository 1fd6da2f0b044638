"""Experts on a GPU: Triton's grouped products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Experts, ExpertWeights, HeadsLinear
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer_kernels.experts import Choice, Groups, group_by_expert
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.combine import combine
from batchinfer_kernels.gpu.grouped_coded_matmul import grouped_int4_matmul, grouped_mxfp4_matmul
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.mxfp4 import packed_mxfp4
from batchinfer_kernels.quantized_matmul import packed_int4_experts


class CodedExperts(Experts):
    """Experts in MXFP4 or int4, widened in registers; sorted as TritonExperts'."""

    skips = True

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation,
        deterministic: bool,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of activations."""
        self._gate_up, self._down = (_packed(weights, dtype) for weights in (gate_up, down))
        self._biases = (gate_up.bias, down.bias)
        self._activation, self._deterministic = activation, deterministic
        self.loads = torch.zeros(len(gate_up.weight), dtype=torch.int64, device=gate_up.weight.device)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        groups = _grouped(self.loads, choice, counted)
        fixed, (into, back) = self._deterministic, self._biases
        rows = groups.order // choice.experts.shape[1]
        inner = self._gate_up(
            x, groups.starts, into, activation=self._activation, from_rows=rows, deterministic=fixed
        )
        made = self._down(inner, groups.starts, back, deterministic=fixed)
        return combine(made, groups.order, choice.weights)


def _packed(weights: ExpertWeights, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the product with these weights."""
    assert weights.scales is not None, "it is in codes"
    if weights.mxfp4:
        packed = packed_mxfp4(weights.weight, weights.scales)
        return lambda x, *more, **options: grouped_mxfp4_matmul(x, packed, *more, **options)
    coded = packed_int4_experts(weights.weight, weights.scales, weights.zeros, weights.group, dtype)
    return lambda x, *more, **options: grouped_int4_matmul(x, coded, *more, **options)


def _grouped(loads: Tensor, choice: Choice, counted: Tensor | None) -> Groups:
    """Sort rows by expert, and count them."""
    groups = group_by_expert(choice.experts, len(loads))
    if counted is None:
        loads += groups.starts.diff()
    else:
        add_loads(loads, choice.experts, counted)
    return groups


class TritonExperts(Experts):
    """Sorted on the device, so that the host waits for nothing and a graph can replay it."""

    skips = True

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation,
        deterministic: bool,
    ) -> None:
        self._gate_up, self._down = ((weights.weight, weights.scales) for weights in (gate_up, down))
        self._lines = (gate_up.lines, down.lines)
        self._biases = (gate_up.bias, down.bias)
        self._activation, self._deterministic = activation, deterministic
        weight = gate_up.weight
        self.loads = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        groups = _grouped(self.loads, choice, counted)
        (gate_up, scales), (down, down_scales) = self._gate_up, self._down
        inner = grouped_matmul(
            x,
            gate_up,
            groups.starts,
            self._biases[0],
            scales=scales,
            lines=self._lines[0],
            activation=self._activation,
            from_rows=groups.order // choice.experts.shape[1],
            deterministic=self._deterministic,
        )
        made = grouped_matmul(
            inner,
            down,
            groups.starts,
            self._biases[1],
            scales=down_scales,
            lines=self._lines[1],
            deterministic=self._deterministic,
        )
        return combine(made, groups.order, choice.weights)


class TritonHeads(HeadsLinear):
    """A grouped product in which each head has a row of every token."""

    def __init__(self, weights: ExpertWeights, deterministic: bool) -> None:
        self._weight, self._scales = weights.weight.contiguous(), weights.scales
        self._deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        (tokens, heads, _), weight = x.shape, self._weight
        starts = torch.arange(heads + 1, device=x.device) * tokens
        rows = x.transpose(0, 1).reshape(heads * tokens, -1)
        made = grouped_matmul(rows, weight, starts, scales=self._scales, deterministic=self._deterministic)
        return made.view(heads, tokens, -1).transpose(0, 1)
