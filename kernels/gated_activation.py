"""The gate of a gated feed-forward layer (Shazeer, 2020): act(gate) * up."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh"]


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up: (T, 2 × intermediate), gate first. Returns (T, intermediate)."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up need an even number of columns, got {gate_up.shape[-1]}")
    gate, up = gate_up.chunk(2, -1)
    return activation_reference(gate, activation) * up


def activation_reference(x: Tensor, activation: Activation) -> Tensor:
    """Of each value."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
