"""Linear layers of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.ops.interface import Head, Linear
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed import PackedWeight

# The batch size that a weight is laid out for in oneDNN's format
ONEDNN_ROWS = 128


class CompiledLinear(Linear):
    """Panels and tiles of our own (kernels/cpu/panels.h), of values or of int8 codes: a row's bits do not depend on the
    other rows."""

    def __init__(self, compiled: CompiledOperators, weight: PackedWeight) -> None:
        self.in_features, self.out_features = weight.inputs, weight.columns
        self.weight, self._compiled = weight, compiled

    def __call__(self, x: Tensor) -> Tensor:
        return self._compiled.linear(x, self.weight)


class CompiledHead(CompiledLinear, Head):
    """A head that can take the argmax without writing the logits."""

    def argmax(self, x: Tensor) -> Tensor:
        return self._compiled.argmax(x, self.weight)


class OneDnnLinear(Linear):
    """bfloat16, in oneDNN's own layout: torch's plain linear packs the weight anew at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONEDNN_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's products of packed weights in `dtype` on this CPU."""
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
