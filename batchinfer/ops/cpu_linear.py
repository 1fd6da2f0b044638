"""Linear layers of a CPU: the ways to compute one, and the choice between them by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from batchinfer.ops.interface import Head, Linear
from batchinfer.ops.torch_ops import TorchLinear
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.packed import Kind, PackedWeight

# The batch size that a weight is laid out for in oneDNN's format
ONEDNN_ROWS = 128
# Rows that a way is timed with: a decode step's, and a prefill step's
TIMED_ROWS = (128, 1024)
TIMED_CALLS = 3
# Another way is taken only when it is so much faster: timings differ from run to run by a few percent, and equal
# choices give equal numbers.
LEAST_GAIN = 1.1


class CompiledLinear(Linear):
    """Panels and tiles of our own (kernels/cpu/panels.h), of values or of int8 codes: a row's bits do not depend on the
    other rows."""

    def __init__(self, compiled: CompiledOperators, weight: PackedWeight) -> None:
        self.in_features, self.out_features = weight.inputs, weight.columns
        self.weight, self._compiled = weight, compiled

    def __call__(self, x: Tensor) -> Tensor:
        return self._compiled.linear(x, self.weight)


class CompiledHead(CompiledLinear, Head):
    """With float results, which greedy rows need not have written."""

    def likeliest(self, x: Tensor) -> Tensor:
        return self._compiled.greatest(x, self.weight)


class OneDnnLinear(Linear):
    """bfloat16, in oneDNN's own layout: torch's plain linear packs the weight anew at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ONEDNN_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


Layer = TypeVar("Layer", bound=Linear)
Ways = dict[str, Callable[[], Layer]]  # name → pack the weight that way


class LinearChoice:
    """For each shape of weight the fastest way, timed when the first such weight is packed."""

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, int, Kind], str] = {}

    def pack(self, weight: Tensor, kind: Kind, ways: Ways[Layer]) -> Layer:
        """The first of `ways` is kept unless another is clearly faster."""
        shape = (weight.shape[0], weight.shape[1], kind)
        if shape not in self._chosen:
            self._chosen[shape] = _fastest(weight, ways) if len(ways) > 1 else next(iter(ways))
        return ways[self._chosen[shape]]()

    def __str__(self) -> str:
        names = sorted(set(self._chosen.values()))
        if len(names) < 2:
            return "".join(names)
        return ", ".join(f"{o}x{i} {name}" for (o, i, _), name in sorted(self._chosen.items()))


def _fastest(weight: Tensor, ways: Mapping[str, Callable[[], Linear]]) -> str:
    seconds = {name: sum(_seconds(pack(), weight)) for name, pack in ways.items()}
    first, best = next(iter(ways)), min(seconds, key=lambda name: seconds[name])
    return best if seconds[first] > LEAST_GAIN * seconds[best] else first


def _seconds(linear: Linear, weight: Tensor) -> Iterator[float]:
    for rows in TIMED_ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        yield min(_timed(linear, x) for _ in range(TIMED_CALLS))


def _timed(linear: Linear, x: Tensor) -> float:
    began = time.perf_counter()
    linear(x)
    return time.perf_counter() - began


def other_ways(weight: Tensor, bias: Tensor | None) -> Ways[Linear]:
    """What torch has to offer for a weight's dtype."""
    if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return {"onednn": lambda: OneDnnLinear(weight, bias)}
    return {"torch": lambda: TorchLinear(weight, bias)}
