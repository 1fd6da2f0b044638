"""The one place that decides which operators a device gets."""

from __future__ import annotations

from batchinfer.ops.interface import Ops
from batchinfer.ops.torch_ops import TorchOps


def choose_ops() -> Ops:
    """Torch's operators, on every device: no other implementation exists yet."""
    return TorchOps()
