"""Quantises weights once they are loaded, into the forms that a model's spec gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.ops.interface import CodedWeight, ExpertWeights, Ops, Weight
from batchinfer.models.spec.parameters import SCALES
from batchinfer.models.spec.spec import LayerSpec
from batchinfer_kernels.arithmetic import WeightForm


def quantized_weight(ops: Ops, weight: Tensor, form: WeightForm | None) -> Weight:
    """Return the weight (out, in) in its form; None: as it is."""
    return weight if form is None else CodedWeight(*ops.rounded(weight, form), group=form.group)


def quantized_heads(ops: Ops, weight: Tensor, form: WeightForm | None) -> ExpertWeights:
    """Return the weights (heads, out, in) in their form; None: as they are."""
    if form is None:
        return ExpertWeights(weight)
    coded = [ops.rounded(matrix, form) for matrix in weight]
    # As bytes: torch does not stack float8_e4m3fn everywhere
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in coded]).view(coded[0][0].dtype)
    return ExpertWeights(codes, scales=torch.stack([scales for _, scales in coded]))


def quantized_layer(ops: Ops, spec: LayerSpec, weights: LayerWeights) -> LayerWeights:
    """Return the weights of a layer with scales beside those that were quantised here, as beside those that are stored
    quantised. Those of heads stay as they are: each head's are quantised, one of them transposed."""
    found = dict(weights)
    for linear in spec.linears:
        if linear.form is not None and not (linear.stored or linear.heads):
            codes, scales = ops.rounded(found[linear.name], linear.form)
            found |= {linear.name: codes, linear.name + SCALES: scales}
    return found
