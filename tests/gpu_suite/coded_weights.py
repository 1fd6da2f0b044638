"""Dummy weights whose products use quantised values, as in published float8_e4m3fn checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.spec.parameters import LINES, SCALES
from batchinfer.models.spec.spec import LayerSpec, ModelSpec
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.block_fp8_matmul import GROUP, block_lines
from batchinfer_kernels.fp8_matmul import FP8

LARGEST = 448.0  # largest float8_e4m3fn value
WIDEST = 6.0  # standard deviations; one value in a thousand million is clipped


def in_blocks(spec: ModelSpec) -> ModelSpec:
    """Return the model with quantised weights in every linear layer that supports them, one scale per 128 × 128."""
    layers = (replace(layer, forms=tuple(_coded(layer))) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _coded(layer: LayerSpec) -> Iterator[tuple[str, WeightForm]]:
    yield from (
        (linear.name, WeightForm("fp8", "block", stored=True))
        for linear in layer.linears
        if not (linear.exact or linear.heads or linear.experts)
    )


class CodedWeights(Weights):
    """Dummy weights, quantised if `spec` says so.

    All scales are equal, which does not change the time of a kernel.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        plain = replace(spec, layers=tuple(replace(layer, forms=()) for layer in spec.layers))
        self._spec, self._plain = spec, DummyWeights(plain, dtype, device)
        self._scale = WIDEST * float(spec.hidden) ** -0.5 / LARGEST

    def tables(self) -> Tables:
        return self._plain.tables()

    def layer(self, index: int) -> LayerWeights:
        found = dict(self._plain.layer(index))
        for name, _ in self._spec.layers[index].forms:
            found |= self._codes(name, found[name])
        return found

    def _codes(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        outputs, inputs = weight.shape
        blocks = (-(-outputs // GROUP), -(-inputs // GROUP))
        codes = (weight.float() / self._scale).clamp_(-LARGEST, LARGEST).to(FP8)
        scales = torch.full(blocks, self._scale, device=weight.device)
        return {name: codes, name + SCALES: scales, name + LINES: block_lines(outputs, GROUP, weight.device)}
