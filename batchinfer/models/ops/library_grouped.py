"""Experts in bfloat16 by torch's `grouped_mm` (CUTLASS), which is faster than our kernel for some numbers of rows.

It reads where groups end from the device, so that a graph can replay it, on compute capability 9.0 and 10.0 alone. On
other GPUs torch multiplies group by group, and the host waits for where they end
(aten/src/ATen/native/GroupedMMUtils.h).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.layers import ExpertWeights
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.sort_by_expert import ExpertRows
from batchinfer_kernels.gpu.target import architecture

CAPABILITIES = ("90", "100")
UNIT = 8  # values of 16 bytes, of which rows are multiples


class LibraryGrouped:
    """The library's products of gated experts, whose weights are (experts, out, in) bfloat16."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    @classmethod
    def of(cls, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> LibraryGrouped | None:
        """Return the products; None where the library, or this GPU, has none."""
        if not hasattr(F, "grouped_mm") or architecture() not in CAPABILITIES:
            return None
        for weights in (gate_up, down):
            values = weights.weight
            plain = weights.scales is None and weights.bias is None and values.dtype == torch.bfloat16
            if not plain or not values.is_contiguous() or any(size % UNIT for size in values.shape[1:]):
                return None
        return cls(gate_up.weight, down.weight, activation)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x: (T, hidden) bfloat16 → the results of the sorted rows, (R, hidden); those behind the last expert's are
        anything."""
        ends = rows.starts[1:].to(torch.int32)
        given = x.index_select(0, rows.tokens)
        both = F.grouped_mm(given, self._gate_up.transpose(1, 2), offs=ends)
        inner = gated_activation(both, self._activation)
        return F.grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
