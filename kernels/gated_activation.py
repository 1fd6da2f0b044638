"""The gated activation of a feed-forward layer (Shazeer, 2020): act(gate) * up.

"clamped_swiglu" is that of GPT-OSS (OpenAI, 2025): gate * sigmoid(1.702 gate) * (up + 1), with gate clamped to at most
7 and up to -7 … 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.arithmetic import SWIGLU_ALPHA, SWIGLU_LIMIT
from batchinfer_kernels.arithmetic import Activation as Activation


def gated_activation_reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up, the gated activation of a feed-forward layer: (T, intermediate).

    Args:
        gate_up: (T, 2 × intermediate), the gate's values first, then the values of up.
        activation: activation of the gate; "clamped_swiglu" also changes up.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up need an even number of columns, got {gate_up.shape[-1]}")
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
    return activation_reference(gate, activation) * up


def activation_reference(x: Tensor, activation: Activation) -> Tensor:
    """Return the activation function of each value of x, like x.

    Raises:
        ValueError: For "clamped_swiglu", which needs gate and up.
    """
    if activation == "clamped_swiglu":
        raise ValueError("clamped_swiglu needs a gate and an up")
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
