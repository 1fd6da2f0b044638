"""Buffers of a call of the compiled experts."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.cpu.packed_weights import KINDS, PackedExperts, codes_room, is_gated, scales_room
from batchinfer_kernels.cpu.structures import ExpertsStructure, Weight, address
from batchinfer_kernels.experts import Choice


class ExpertsRoom:
    """The buffers of one call of the compiled experts operator.

    Attributes:
        y: (T, outputs), the result of the call.
        structure: the argument of the C function, which points to the buffers.

    Raises:
        ValueError: If the weights do not match each other or x.
    """

    def __init__(
        self, x: Tensor, gate_up: PackedExperts, down: PackedExperts, choice: Choice, loads: Tensor
    ) -> None:
        _check(x, gate_up, down, loads)
        (tokens, choices), count = choice.experts.shape, gate_up.count
        rows = tokens * choices
        self.y = x.new_empty(tokens, down.columns)
        places = torch.empty(2 * (count + 1) + 2 * rows, dtype=torch.int64)
        widths = (gate_up.inputs, down.inputs, down.columns)
        rooms = [x.new_empty(rows, width) for width in widths]
        codes = codes_room(rows if gate_up.quantized else 0, max(widths[:2]))
        scales = scales_room(len(codes), gate_up, down)
        wide, size = wide_room(x, gate_up, down)
        self._kept = (x, choice, loads, places, *rooms, codes, scales, wide)
        given = (x, choice.experts, choice.weights, self.y, loads)
        parts = torch.split(places, [count + 1, count + 1, rows, rows])
        self.structure = ExpertsStructure(
            *(Weight.from_buffer_copy(weight.structure) for weight in (gate_up, down)),
            *(address(tensor) for tensor in (*given, *parts, *rooms, codes, scales)),
            *(address(wide), size),
            *(tokens, choices, count, KINDS[gate_up.kind]),
        )


def wide_room(x: Tensor, *weights: PackedExperts) -> tuple[Tensor | None, int]:
    """Return a buffer in which each thread dequantises a panel of an MXFP4 weight, and its bytes per thread.

    Args:
        x: the activations, whose dtype the dequantised values get.
        weights: the weights of a product.

    Returns:
        (threads, bytes) uint8 and the number of bytes; None and 0 if no weight is MXFP4.
    """
    size = max(weight.wide_bytes(x.element_size()) for weight in weights)
    return (torch.empty(torch.get_num_threads(), size, dtype=torch.uint8) if size else None), size


def _check(x: Tensor, gate_up: PackedExperts, down: PackedExperts, loads: Tensor) -> None:
    same = (gate_up.quantized, gate_up.widened) == (down.quantized, down.widened)
    fit = gate_up.columns == down.inputs and gate_up.count == down.count and same
    if not fit or not is_gated(gate_up.kind) or down.kind != "plain":
        shapes = [(w.count, w.columns, w.inputs, w.kind) for w in (gate_up, down)]
        raise ValueError(f"gate_up and down do not match: {shapes[0]}, {shapes[1]}")
    if x.dim() != 2 or x.shape[1] != gate_up.inputs:
        raise ValueError(f"x is {tuple(x.shape)}, the experts take {gate_up.inputs} inputs")
    if any(weight.dtype not in (None, x.dtype) for weight in (gate_up, down)):
        raise ValueError(f"x is {x.dtype}, the experts are {gate_up.dtype} and {down.dtype}")
    if loads.shape != (gate_up.count,) or loads.dtype != torch.int64 or not loads.is_contiguous():
        raise ValueError(f"loads are {tuple(loads.shape)} {loads.dtype}, there are {gate_up.count} experts")
