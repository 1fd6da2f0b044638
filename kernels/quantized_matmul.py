"""Linear layers whose weight alone is quantised: int8 per output channel, or int4 in groups along the inputs.

Activations stay as they are; a weight is read as codes and becomes values on the way. int4 as in Frantar et al.,
2023, "GPTQ", and Lin et al., 2024, "AWQ": a scale, and where asked a zero point, for each output and each 32, 64 or
128 of its inputs. Where calibrated codes are not at hand, `quantize_int4` rounds to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.matmul import check_matmul, finished, products
from batchinfer_kernels.quantized_linear import quantize_weight

GROUPS = (32, 64, 128)  # that weights are rounded in
LEAST_CODE, MOST_CODE = -8, 7
MOST_ZERO = 8  # as some formats store zeros less one
SPAN = 128  # inputs whose codes are packed together
PIECE = SPAN // 4  # neighbours that share their scales, whatever the group
WORD_BITS = 16
OUTPUTS_AT_ONCE = 1024  # as the float32 copies of a large weight would take gigabytes


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight (N, inputs) ≈ codes × scales[:, None], as quantized_linear.quantize_weight makes them."""

    packed: Tensor  # (N, spans × 128) uint8: pack_codes of the codes as two's complement
    scales: Tensor  # (N,) float32
    inputs: int

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A weight (N, inputs) ≈ (codes - zeros) × scales, codes in -8 … 7, a scale and a zero for each group of inputs."""

    packed: Tensor  # (N, spans × 64) uint8: pack_codes of codes + 8
    scales: Tensor  # (groups, N) of the activations' dtype
    zeros: Tensor | None  # (groups, N) int8, in -8 … 8; None: all 0
    inputs: int
    group: int  # a multiple of 32

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes: (N, K) uint8 below 2^bits → (N, spans × 16 × bits) uint8. `bits`: 4 or 8.

    A row is cut into spans of 128 codes, the last one filled up with zeros, and a span into pieces, as many as codes
    fit into 16 bits. Word i of a span, little-endian, holds code i of each piece, the first piece's in its lowest bits.
    So one mask and one shift make a whole piece of neighbours, and codes become 16-bit floats where they are.
    """
    if codes.dim() != 2 or codes.dtype != torch.uint8 or bits not in (4, 8):
        raise ValueError(f"codes are {tuple(codes.shape)} {codes.dtype}, of {bits} bits")
    pieces = WORD_BITS // bits
    spans = -(-codes.shape[1] // SPAN)
    filled = torch.nn.functional.pad(codes, (0, SPAN * spans - codes.shape[1]))
    cut = filled.reshape(len(codes), spans, pieces, SPAN // pieces).transpose(2, 3)
    if bits == 4:  # two neighbours of a word share a byte
        cut = cut[..., 0::2] | cut[..., 1::2] << 4
    return cut.reshape(len(codes), spans * SPAN * bits // 8).contiguous()


def unpack_codes(packed: Tensor, bits: int, inputs: int) -> Tensor:
    """The codes (N, inputs) uint8 that `pack_codes` was given."""
    pieces = WORD_BITS // bits
    cut = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1)
    spans = packed.shape[1] * 8 // bits // SPAN
    wide = cut.reshape(len(packed), spans, SPAN // pieces, pieces).transpose(2, 3)
    return wide.reshape(len(packed), spans * SPAN)[:, :inputs]


def quantize_int8(weight: Tensor) -> Int8Weight:
    """weight: (N, K) of floats. Raises ValueError for any other tensor."""
    codes, scales = quantize_weight(weight)
    return Int8Weight(pack_codes(codes.view(torch.uint8), 8), scales, weight.shape[1])


def quantize_int4(weight: Tensor, group: int, symmetric: bool = True) -> Int4Weight:
    """weight: (N, K) of the activations' dtype, rounded to nearest code. Raises ValueError for any other tensor.

    Symmetric: the largest magnitude of a group becomes ±7. Else the group's range, 0 included, becomes -8 … 7. A group
    with a value that is no finite number has scale NaN.
    """
    if weight.dim() != 2 or not weight.is_floating_point() or group not in GROUPS:
        raise ValueError(f"weight is {tuple(weight.shape)} {weight.dtype}, in groups of {group}")
    coded = [_quantized(part, group, symmetric) for part in torch.split(weight, OUTPUTS_AT_ONCE)]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*coded, strict=True))
    packed = pack_codes((codes[:, : weight.shape[1]] - LEAST_CODE).to(torch.uint8), 4)
    laid = [t.T.contiguous() for t in (scales, zeros)]
    return Int4Weight(packed, laid[0], None if symmetric else laid[1], weight.shape[1], group)


def _quantized(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """codes (N, groups × group), scales and zeros (N, groups)."""
    missing = -weight.shape[1] % group
    values = torch.nn.functional.pad(weight.float(), (0, missing)).reshape(len(weight), -1, group)
    least, most = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    steps = torch.maximum(-least, most) / MOST_CODE if symmetric else (most - least) / 15
    scales = torch.where(steps.isfinite(), steps, torch.nan).to(weight.dtype)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    zeros = torch.zeros_like(least) if symmetric else (LEAST_CODE - least * inverse).nan_to_num(0).round()
    zeros = zeros.clamp(LEAST_CODE, MOST_CODE)
    codes = (values * inverse[..., None]).nan_to_num(0).round() + zeros[..., None]
    codes = codes.clamp(LEAST_CODE, MOST_CODE).to(torch.int8)
    return codes.reshape(len(weight), -1), scales, zeros.to(torch.int8)


def packed_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype
) -> Int4Weight:
    """Pack a weight (N, K) whose codes are known, for activations of `dtype`, to which scales are rounded.

    codes: (N, K) int8 in -8 … 7; scales, zeros: (N, groups) floats, the zeros integers in -8 … 8. Zeros that are all 0
    are left out. Raises ValueError for others.
    """
    groups = -(-codes.shape[1] // group) if group > 0 and codes.dim() == 2 else 0
    shapes = {tuple(part.shape) for part in (scales, zeros) if part is not None}
    if codes.dtype != torch.int8 or shapes != {(len(codes), groups)} or group % PIECE:
        raise ValueError(
            f"codes are {tuple(codes.shape)} {codes.dtype}, scales {tuple(scales.shape)}, of {group}"
        )
    packed = pack_codes((codes - LEAST_CODE).to(torch.uint8), 4)
    kept = None if zeros is None or not bool(zeros.any()) else zeros.to(torch.int8).T.contiguous()
    if kept is not None and (int(kept.min()) < LEAST_CODE or int(kept.max()) > MOST_ZERO):
        raise ValueError(
            f"zeros are {int(kept.min())} … {int(kept.max())}, not in {LEAST_CODE} … {MOST_ZERO}"
        )
    return Int4Weight(packed, scales.to(dtype).T.contiguous(), kept, codes.shape[1], group)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weights:
    """The weights (experts, N, inputs) of several experts, each as an Int4Weight."""

    packed: Tensor  # (experts, N, spans × 64) uint8
    scales: Tensor  # (experts, groups, N) of the activations' dtype
    zeros: Tensor | None  # (experts, groups, N) int8
    inputs: int
    group: int

    def of(self, expert: int) -> Int4Weight:
        """Return the weight of one expert."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return Int4Weight(self.packed[expert], self.scales[expert], zeros, self.inputs, self.group)


def packed_int4_experts(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int, dtype: torch.dtype
) -> Int4Weights:
    """Pack weights as `packed_int4` does, each expert's; all have a first dimension for the experts."""
    outputs = codes.shape[1]
    flat = codes.flatten(0, 1), scales.flatten(0, 1), None if zeros is None else zeros.flatten(0, 1)
    whole = packed_int4(*flat, group, dtype)

    def split(grouped: Tensor) -> Tensor:
        """(groups, experts × N) → (experts, groups, N)."""
        return grouped.view(len(grouped), -1, outputs).transpose(0, 1).contiguous()

    packed = whole.packed.view(len(codes), outputs, -1)
    kept = None if whole.zeros is None else split(whole.zeros)
    return Int4Weights(packed, split(whole.scales), kept, whole.inputs, group)


def grouped_int4_matmul_reference(
    x: Tensor,
    weights: Int4Weights,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Multiply as grouped_matmul_reference does, with `int4_values` as weights."""
    values = torch.stack([int4_values(weights.of(expert)) for expert in range(len(weights.packed))])
    return grouped_matmul_reference(x, values, starts, bias, activation=activation)


def int4_values(weight: Int4Weight) -> Tensor:
    """The weight (N, inputs) that is multiplied with, in the dtype of its scales: one rounding a value."""
    steps = unpack_codes(weight.packed, 4, weight.inputs).float() + LEAST_CODE
    if weight.zeros is not None:
        steps -= _each_input(weight.zeros, weight)
    return (steps * _each_input(weight.scales, weight)).to(weight.scales.dtype)


def _each_input(grouped: Tensor, weight: Int4Weight) -> Tensor:
    """(groups, N) → (N, inputs) float32."""
    return grouped.float().T.repeat_interleave(weight.group, 1)[:, : weight.inputs]


def check_int4_weight(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    check_matmul(x, (weight.outputs, weight.inputs), bias, out_dtype, activation)
    if weight.group < PIECE or weight.group % PIECE:
        raise ValueError(f"groups of {weight.group}, not of a multiple of {PIECE}")
    _check_packed(weight, 4)
    groups = -(-weight.inputs // weight.group)
    if weight.scales.shape != (groups, weight.outputs) or weight.scales.dtype != x.dtype:
        raise ValueError(f"scales are {tuple(weight.scales.shape)} {weight.scales.dtype}, x is {x.dtype}")
    zeros = weight.zeros
    if zeros is not None and (zeros.shape != weight.scales.shape or zeros.dtype != torch.int8):
        raise ValueError(f"zeros are {tuple(zeros.shape)} {zeros.dtype}")


def int4_weight_matmul_reference(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """As matmul_reference, with `int4_values` as the weight."""
    check_int4_weight(x, weight, bias, out_dtype, activation)
    return finished(products(x, int4_values(weight)), bias, out_dtype or x.dtype, activation)


def check_int8_weight(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    check_matmul(x, (weight.outputs, weight.inputs), bias, out_dtype, activation)
    _check_packed(weight, 8)
    scales = weight.scales
    if scales.shape != (weight.outputs,) or scales.dtype != torch.float32:
        raise ValueError(f"scales are {tuple(scales.shape)} {scales.dtype}, for {weight.outputs} outputs")


def _check_packed(weight: Int8Weight | Int4Weight, bits: int) -> None:
    width = -(-weight.inputs // SPAN) * SPAN * bits // 8
    if weight.packed.shape[1:] != (width,) or weight.packed.dtype != torch.uint8:
        raise ValueError(f"packed codes are {tuple(weight.packed.shape)} {weight.packed.dtype}")


def int8_weight_matmul_reference(
    x: Tensor,
    weight: Int8Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """Multiply as matmul_reference does. Codes are multiplied as values of x's dtype, which hold them exactly; a sum is
    multiplied with its output's scale in float32."""
    check_int8_weight(x, weight, bias, out_dtype, activation)
    codes = unpack_codes(weight.packed, 8, weight.inputs).view(torch.int8)
    return finished(products(x, codes) * weight.scales, bias, out_dtype or x.dtype, activation)
