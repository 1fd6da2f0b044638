"""Linear layers with only the weight quantised. Cost: batchinfer_kernels.cost.weight_only_linear_cost.

matmul.py defines `deterministic`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.checks import check_same_dtype
from batchinfer_kernels.gpu.matmul_core import Operands, give, launch, multiplied, tile_place, weight_row
from batchinfer_kernels.gpu.matmul_tiles import Kind
from batchinfer_kernels.gpu.sizes import cdiv
from batchinfer_kernels.mxfp4 import GROUP as MXFP4_GROUP
from batchinfer_kernels.mxfp4 import Mxfp4Weight, check_mxfp4_linear
from batchinfer_kernels.quantized_matmul import (
    SPAN,
    Int4Weight,
    check_int4_weight,
)

# Outputs per program, which widens one span of each. Not measured: 64 values per thread, written 16 bytes at a time
WIDENED_LINES = 64
# Outputs of a part of a weight are a multiple of this, to fill the tiles of the library
PART_OUTPUTS = 128

# Packed values become floats in place: they are put into the last mantissa bits of a 16-bit float whose other bits are
# a constant, and the constant is subtracted. Both are exact, and apply to both halves of a register at once.


@triton.jit
def _int4_values(words, zero, scale, PIECE: tl.constexpr, dtype: tl.constexpr):
    codes = (words >> (PIECE * 4)) & 15
    if dtype == tl.float32:
        return (codes.to(tl.float32) - (8.0 + zero.to(tl.float32))) * scale
    elif dtype == tl.float16:
        return ((codes | 0x6400).to(tl.float16, bitcast=True) - (1032 + zero.to(tl.int16)).to(dtype)) * scale
    else:
        return ((codes | 0x4300).to(tl.bfloat16, bitcast=True) - (136 + zero.to(tl.int16)).to(dtype)) * scale


@triton.jit
def _mxfp4_values(words, exponent, PIECE: tl.constexpr, dtype: tl.constexpr):
    # The four bits of a value become the sign, exponent and mantissa of a float, which then is too small by a constant
    # power of two. It is multiplied by that power and by the group's power separately, because their product may
    # overflow
    codes = words >> (PIECE * 4)
    if dtype == tl.bfloat16:
        small = (((codes & 7) << 6) | ((codes & 8) << 12)).to(tl.bfloat16, bitcast=True)
        power = (exponent.to(tl.int16) << 7) | ((exponent == 0).to(tl.int16) << 6)
        return (small * 8.507059173023462e37) * power.to(tl.bfloat16, bitcast=True)  # 2^126
    else:
        small = (((codes & 7) << 9) | ((codes & 8) << 12)).to(tl.float16, bitcast=True)
        power = (exponent.to(tl.int32) << 23) | ((exponent == 0).to(tl.int32) << 22)
        return ((small.to(tl.float32) * 16384.0) * power.to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def coded_values(
    words, first, from_row, inputs, outputs, groups_ptr, zeros_ptr,
    PIECE: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return one of the four values in each 16-bit word of a packed weight, dequantised: (lines, words).

    - words (lines, words): int16, as `pack_codes` packs them. PIECE 0 … 3: which value of a word. first: the input to
      which the first value belongs.
    - from_row (lines,): the row of the weight of each line; `inputs` and `outputs` are the weight's sizes.
    - groups_ptr (groups, outputs): scales of int4 values, or uint8 exponents of MXFP4 values. zeros_ptr: zero points,
      or None. GROUP: number of inputs that share them.
    """
    # A piece belongs to one group. A piece beyond the last input has no group, but is multiplied by zeros
    at = (tl.minimum(first, inputs - 1) // GROUP).to(tl.int64) * outputs + from_row
    scale = tl.load(groups_ptr + at)[:, None]
    if groups_ptr.dtype.element_ty == tl.uint8:
        return _mxfp4_values(words, scale, PIECE, dtype)
    elif zeros_ptr is None:
        return _int4_values(words, tl.zeros((1, 1), tl.int8), scale, PIECE, dtype)
    else:
        return _int4_values(words, tl.load(zeros_ptr + at)[:, None], scale, PIECE, dtype)


@triton.jit
def coded_segment_sums(
    weight_at, x_at, from_row, first, end, inputs, outputs, groups_ptr, zeros_ptr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the product of a packed weight and x, (LINES, ROWS) float32, summed over the inputs [first, end).

    - weight_at (LINES, INPUTS / 4), x_at (INPUTS / 4, ROWS): pointers to the first words and the first values of x.
    - from_row, groups_ptr, zeros_ptr, GROUP: as in `coded_values`. EVEN: `inputs` is a multiple of INPUTS.
    """
    PIECES: tl.constexpr = 4
    WORDS: tl.constexpr = INPUTS // PIECES
    sums = tl.zeros((LINES, ROWS), tl.float32)
    at = tl.arange(0, WORDS)
    weight_at += first // PIECES
    x_at += first
    for start in range(first, end, INPUTS):
        words = tl.load(weight_at)
        for piece in tl.static_range(PIECES):
            if EVEN:
                x = tl.load(x_at + piece * WORDS)
            else:
                real = start + piece * WORDS + at < inputs
                x = tl.load(x_at + piece * WORDS, mask=real[:, None], other=0.0)
            values = coded_values(
                words, start + piece * WORDS, from_row, inputs, outputs, groups_ptr, zeros_ptr,
                piece, GROUP, x.dtype,
            )  # fmt: skip
            sums = multiplied(values, x, sums, PRECISION)
        weight_at += WORDS
        x_at += INPUTS
    return sums


@triton.jit(do_not_specialize=["rows", "segment"])
def _coded_matmul_kernel(
    x_ptr,
    weight_ptr,  # (outputs, words) int16
    groups_ptr, zeros_ptr,  # (groups, outputs), or None
    scales_ptr, row_scales_ptr, bias_ptr, y_ptr, parts_ptr,
    rows, outputs, inputs, stride_x, stride_weight, stride_y, segment,
    SUM: tl.constexpr, EVEN: tl.constexpr, IN_TURN: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # Arguments are as in `coded_values` and `matmul_kernel`
    line_tiles, row_tiles = tl.cdiv(outputs, LINES), tl.cdiv(rows, ROWS)
    line_tile, row_tile = tile_place(tl.program_id(0), line_tiles, row_tiles, TOGETHER)
    line = line_tile * LINES + tl.arange(0, LINES)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    WORDS: tl.constexpr = INPUTS // 4
    at = tl.arange(0, WORDS)
    from_row = weight_row(line, outputs, ACTIVATION).to(tl.int64)
    weight_at = weight_ptr + from_row[:, None] * stride_weight + at[None, :]
    x_at = x_ptr + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * stride_x + at[:, None]
    if IN_TURN:
        sums = tl.zeros((LINES, ROWS), SUM)
        for first in range(0, inputs, segment * INPUTS):
            end = tl.minimum(first + segment * INPUTS, inputs)
            sums += coded_segment_sums(
                weight_at, x_at, from_row, first, end, inputs, outputs, groups_ptr, zeros_ptr,
                EVEN, PRECISION, GROUP, LINES, ROWS, INPUTS,
            )  # fmt: skip
    else:
        first = tl.program_id(1) * segment * INPUTS
        end = tl.minimum(first + segment * INPUTS, inputs)
        sums = coded_segment_sums(
            weight_at, x_at, from_row, first, end, inputs, outputs, groups_ptr, zeros_ptr,
            EVEN, PRECISION, GROUP, LINES, ROWS, INPUTS,
        )  # fmt: skip
    give(
        sums, line_tile * LINES, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, parts_ptr,
        rows, outputs, stride_y, line_tiles * LINES, row_tiles * ROWS, ACTIVATION, LINES, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first", "lines"])
def _widen_kernel(
    weight_ptr,  # (outputs, words) int16
    groups_ptr, zeros_ptr,  # (groups, outputs); zeros_ptr may be None
    panel_ptr,  # (lines, inputs)
    first, lines,  # first output and number of outputs
    outputs, inputs, stride_weight,
    GROUP: tl.constexpr, SPAN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    PIECES: tl.constexpr = 4
    PIECE: tl.constexpr = SPAN // PIECES
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    at = tl.arange(0, PIECE)
    from_row = tl.minimum(first + line, outputs - 1).to(tl.int64)
    words = tl.load(weight_ptr + from_row[:, None] * stride_weight + (tl.program_id(1) * PIECE + at)[None, :])
    to = panel_ptr + line.to(tl.int64)[:, None] * inputs
    for piece in tl.static_range(PIECES):
        start = tl.program_id(1) * SPAN + piece * PIECE
        values = coded_values(
            words, start, from_row, inputs, outputs, groups_ptr, zeros_ptr, piece, GROUP,
            panel_ptr.dtype.element_ty,
        )  # fmt: skip
        column = start + at
        tl.store(to + column[None, :], values, mask=(line < lines)[:, None] & (column < inputs)[None, :])


def _shared(weight: Int4Weight | Mxfp4Weight) -> tuple[Tensor, Tensor | None, int]:
    if isinstance(weight, Int4Weight):
        return weight.scales, weight.zeros, weight.group
    return weight.exponents, None, MXFP4_GROUP


def widen(weight: Int4Weight | Mxfp4Weight, first: int, panel: Tensor) -> None:
    """Dequantise some outputs of a packed weight into `panel`.

    Args:
        weight: the weight.
        first: index of the first output to dequantise.
        panel: (outputs to dequantise, inputs), contiguous; of the dtype of int4 scales, or of any float dtype for
            MXFP4.

    Raises:
        ValueError: If the panel does not match or exceeds the weight.
    """
    lines, inputs = panel.shape
    fits = inputs == weight.inputs and first >= 0 and first + lines <= weight.outputs
    groups, zeros, group = _shared(weight)
    if not fits or groups.dtype not in (panel.dtype, torch.uint8) or not panel.is_contiguous():
        raise ValueError(
            f"a panel {tuple(panel.shape)} {panel.dtype} at output {first} does not match a weight of "
            f"{weight.outputs} outputs and {weight.inputs} inputs"
        )
    if panel.numel() == 0:
        return
    words = weight.packed.view(torch.int16)
    _widen_kernel[(cdiv(lines, WIDENED_LINES), cdiv(inputs, SPAN))](
        words, groups, zeros, panel, first, lines, weight.outputs, inputs, words.stride(0),
        GROUP=group, SPAN=SPAN, LINES=WIDENED_LINES, num_warps=4,
    )  # fmt: skip


def panel_matmul(x: Tensor, weight: Int4Weight | Mxfp4Weight, bias: Tensor | None, panel: Tensor) -> Tensor:
    """Return x W^T + bias for a packed weight, by dequantising parts of it into a buffer for torch: (T, N).

    Args:
        x: (T, K).
        weight: the weight, with N outputs.
        bias: (N,), or None.
        panel: the buffer, in x's dtype. At least one output must fit; all that fit are dequantised at a time.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    if isinstance(weight, Int4Weight):
        check_int4_weight(x, weight, bias, None, None)
    else:
        check_mxfp4_linear(x, weight, bias, None)
    whole = weight.outputs * weight.inputs <= panel.numel()
    height = weight.outputs if whole else panel.numel() // weight.inputs // PART_OUTPUTS * PART_OUTPUTS
    height = height or panel.numel() // max(1, weight.inputs)
    if height < 1:
        raise ValueError(f"a panel of {panel.numel()} values is too small for {weight.inputs} inputs")
    y = torch.empty(len(x), weight.outputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.outputs, height):
        end = min(first + height, weight.outputs)
        part = panel[: (end - first) * weight.inputs].view(end - first, weight.inputs)
        widen(weight, first, part)
        if bias is None:
            torch.mm(x, part.t(), out=y[:, first:end])
        else:
            torch.addmm(bias[first:end], x, part.t(), out=y[:, first:end])
    return y


def int4_weight_matmul(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return x W^T + bias for a packed int4 weight: (T, N), or (T, N / 2) with an activation.

    It computes what `int4_weight_matmul_reference` computes.

    Args:
        x: (T, K); rows may be strided.
        weight: the weight, with N outputs.
        bias: (N,), or None.
        out_dtype: dtype of the result, x's by default.
        activation: gated activation of the result, or None.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
    """
    check_int4_weight(x, weight, bias, out_dtype, activation)
    groups, zeros = weight.scales.contiguous(), None if weight.zeros is None else weight.zeros.contiguous()
    return _multiply(x, weight, bias, out_dtype, activation, deterministic, groups, zeros, weight.group)


def mxfp4_matmul(
    x: Tensor,
    weight: Mxfp4Weight,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return x W^T + bias for a packed MXFP4 weight: (T, N), or (T, N / 2) with an activation.

    It computes what `mxfp4_matmul_reference` computes.

    Args:
        x: (T, K); rows may be strided.
        weight: the weight, with N outputs.
        bias: (N,), or None.
        activation: gated activation of the result, or None.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
    """
    check_mxfp4_linear(x, weight, bias, activation)
    groups = weight.exponents.contiguous()
    return _multiply(x, weight, bias, None, activation, deterministic, groups, None, MXFP4_GROUP)


def _multiply(
    x: Tensor,
    weight: Int4Weight | Mxfp4Weight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    activation: Activation | None,
    deterministic: bool,
    groups: Tensor | None,
    zeros: Tensor | None,
    group: int,
) -> Tensor:
    check_same_dtype(x=x)
    words = weight.packed.contiguous().view(torch.int16)
    operands = Operands(x, words, weight.outputs, out_dtype or x.dtype, None, None, bias, activation)
    kind: Kind = "wide" if x.dtype == torch.float32 else "coded"
    more = {"groups_ptr": groups, "zeros_ptr": zeros, "GROUP": group}
    return launch(_coded_matmul_kernel, operands, kind, deterministic, SPAN, **more)
