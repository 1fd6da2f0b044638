"""Quantises weights once they are loaded, into the forms that a model's spec gives them."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.ops.interface import ExpertWeights, Ops, Weight
from batchinfer_kernels.arithmetic import WeightForm


def quantized_weight(ops: Ops, weight: Tensor, form: WeightForm | None) -> Weight:
    """Return the weight (out, in) in its form; None: as it is."""
    return weight if form is None else ops.quantized(weight, form)


def quantized_heads(ops: Ops, weight: Tensor, form: WeightForm | None) -> ExpertWeights:
    """Return the weights (heads, out, in) in their form; None: as they are."""
    if form is None:
        return ExpertWeights(weight)
    coded = [ops.rounded(matrix, form) for matrix in weight]
    # As bytes: torch does not stack float8_e4m3fn everywhere
    codes = torch.stack([codes.view(torch.uint8) for codes, _ in coded]).view(coded[0][0].dtype)
    return ExpertWeights(codes, scales=torch.stack([scales for _, scales in coded]))
