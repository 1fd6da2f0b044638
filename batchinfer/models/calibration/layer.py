"""One layer of a calibration: its inputs are looked at, its channels scaled, its weights rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.models.calibration.channels import scale_channels
from batchinfer.models.checkpoint.tensor_names import StoredParameter
from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.ops.interface import Linear
from batchinfer.models.spec.parameters import SCALES
from batchinfer.models.spec.spec import LayerSpec, LinearSpec
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.int4_feedback import codes_with_feedback
from batchinfer_kernels.int4_linear import quantize_groups

STRIPES = 8  # of the products of inputs: nine sixteenths of them are computed, as they are symmetric


class WatchedLinear(Linear):
    """A product that adds up the products of its inputs, of tokens that count."""

    def __init__(self, inner: Linear, counted: Iterator[Tensor], device: torch.device) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._counted = inner, counted
        self._lower = torch.zeros(inner.in_features, inner.in_features, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        seen, stripe = x[next(self._counted)].float(), -(-self.in_features // STRIPES)
        for first in range(0, self.in_features, stripe):
            end = first + stripe
            self._lower[first:end, :end].addmm_(seen[:, first:end].T, seen[:, :end])
        return self._inner(x)

    @property
    def products(self) -> Tensor:
        """Return X^T X of the inputs, (in, in) float32."""
        lower = self._lower.tril()
        return lower + lower.tril(-1).T


@dataclass(frozen=True, slots=True)
class RoundedLayer:
    """A layer with codes and scales in place of some weights, and the spec that says so. All else is float32, as a
    checkpoint of the dtype holds it."""

    spec: LayerSpec
    weights: LayerWeights


def rounds(layer: LayerSpec, names: Mapping[str, StoredParameter], group: int) -> list[LinearSpec]:
    """Return the linear layers whose weights become codes that the checkpoint's tensors, by their `names`, can hold:
    whole tensors, or outputs of them."""
    return [
        linear
        for linear in layer.linears
        if not (linear.exact or linear.heads or linear.experts)
        and linear.inputs % group == 0
        and all(_is_matrix(names[part]) for part, _ in linear.parts)
    ]


def _is_matrix(place: StoredParameter) -> bool:
    part = place.part
    return not place.rows and (part is None or (part.index is None and not part.transposed))


def rounded_layer(
    layer: LayerSpec, weights: LayerWeights, products: Mapping[str, Tensor], group: int, dtype: torch.dtype
) -> RoundedLayer:
    """weights: float32; products: of the inputs of the linear layers that are to be rounded; `dtype`: of the
    checkpoint that is to hold what comes out."""
    changed, seen = dict(weights), dict(products)
    scale_channels(layer, changed, seen, group, dtype)
    form = WeightForm("int4", "group", stored=True, group=group)
    forms = dict(layer.quantized("int4").forms) | dict.fromkeys(seen, form)
    for name, inputs in seen.items():
        scales = quantize_groups(changed[name], group)[1].to(dtype)
        changed[name] = codes_with_feedback(changed[name], scales, inputs, group)
        changed[name + SCALES] = scales.float()
    return RoundedLayer(replace(layer, forms=tuple(forms.items())), changed)
