"""Calibrates one layer: records its inputs, scales its channels, and rounds its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.models.calibration.channels import scale_channels
from batchinfer.models.calibration.experts import EXPERTS, SeenTokens, round_experts
from batchinfer.models.calibration.work import STRIPES
from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.ops.layers import Linear
from batchinfer.models.spec.parameters import SCALES
from batchinfer.models.spec.spec import LayerSpec
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.int4_feedback import round_with_feedback
from batchinfer_kernels.int4_linear import quantize_groups

GATE_UP, DOWN = EXPERTS + "gate_up", EXPERTS + "down"


class WatchedLinear(Linear):
    """Wraps a linear layer, and sums X^T X of its inputs X, (tokens, in).

    Only tokens that calibration counts are included: a prefix that several rows share counts once.
    """

    def __init__(self, inner: Linear, counted: Iterator[Tensor], device: torch.device) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._counted = inner, counted
        self._lower = torch.zeros(inner.in_features, inner.in_features, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs of the linear layer, and add X^T X of the inputs to the sum."""
        seen, stripe = x[next(self._counted)].float(), -(-self.in_features // STRIPES)
        for first in range(0, self.in_features, stripe):
            end = first + stripe
            self._lower[first:end, :end].addmm_(seen[:, first:end].T, seen[:, :end])
        return self._inner(x)

    @property
    def products(self) -> Tensor:
        """Return X^T X of the inputs X of all calls so far, (in, in) float32."""
        lower = self._lower.tril()
        return lower + lower.tril(-1).T


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Statistics of the inputs of a layer's matrix products, with which their weights can be rounded with little error.

    Args:
        products: X^T X of the inputs X, (in, in) float32, by name of the product. Products of experts are left out.
        seen: The inputs of the layer's experts, and the router's choices. None: no experts are rounded.
    """

    products: Mapping[str, Tensor]
    seen: SeenTokens | None


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """A layer after calibration.

    Args:
        spec: The spec of the layer, with the storage forms of quantised weights.
        weights: The weights of the layer. Those that are not quantised are float32, rounded to the dtype of the
            checkpoint to write.
    """

    spec: LayerSpec
    weights: LayerWeights


def round_layer(
    layer: LayerSpec, weights: LayerWeights, read: LayerInputs, group: int, dtype: torch.dtype
) -> RoundedLayer:
    """Return a copy of a layer whose channels are scaled, and whose weights are rounded to int4 with little error.

    Args:
        layer: The layer.
        weights: Its weights, float32. Weights of experts change in place.
        read: The recorded inputs of the matrix products to round.
        group: Number of consecutive inputs that share a scale.
        dtype: The dtype of the checkpoint to write.
    """
    changed, products, seen = dict(weights), dict(read.products), read.seen
    if seen is not None:
        products[GATE_UP] = seen.products
    columns = scale_channels(layer, changed, products, group, dtype)
    for name in read.products:
        scales = quantize_groups(changed[name], group)[1].to(dtype)
        changed[name] = round_with_feedback(changed[name], scales, products[name], group)
        changed[name + SCALES] = scales.float()
    if seen is not None:
        seen = seen.divide(columns[GATE_UP]) if GATE_UP in columns else seen
        round_experts(layer, changed, seen, group, dtype)
    form = WeightForm("int4", "group", stored=True, group=group)
    names = [*read.products, *([] if seen is None else [GATE_UP, DOWN])]
    forms = dict(layer.quantized("int4").forms) | dict.fromkeys(names, form)
    return RoundedLayer(replace(layer, forms=tuple(forms.items())), changed)
