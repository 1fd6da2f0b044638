"""The kernel for weights that are not packed, and the functions that all matrix products share.

Rows and outputs beyond the last one are computed from the last one and not written. Only inputs need a mask, and only
if the last tile is not full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import GROUP
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import target
from batchinfer_kernels.gpu.checks import unit_columns
from batchinfer_kernels.gpu.gated_activation import gate_factor, up_factor
from batchinfer_kernels.gpu.matmul_tiles import Kind, ProductSplit, choose_split
from batchinfer_kernels.gpu.sizes import cdiv

# Tiles of outputs in a group, which keeps the rows and weights that they read in the L2 cache
TOGETHER = 8
# Tiles with more sums are finished in two halves, because results and their addresses exceed the registers. Compiled
# for compute capability 9.0 with 1025 outputs: int8 in tiles of 128 x 256 has 255 registers and 1520 bytes of stack if
# finished at once, and 241 and none in halves; fp8 in tiles of 128 x 128 has 255 and 24 bytes, and 164 and none
FINISHED_SUMS = tl.constexpr(128 * 64)
# The tile of `add_parts_kernel`, small enough to fill the GPU if there are few outputs
PART_LINES, PART_ROWS = 32, 64


@triton.jit
def tile_place(place, line_tiles, row_tiles, TOGETHER: tl.constexpr):
    """Return the numbers (tile of outputs, tile of rows) of program number `place`.

    Consecutive programs compute all row tiles of TOGETHER output tiles, then all row tiles of the next output tiles.
    `line_tiles` and `row_tiles` are the total numbers of output tiles and row tiles.
    """
    group = place // (TOGETHER * row_tiles)
    first = group * TOGETHER
    size = tl.minimum(line_tiles - first, TOGETHER)
    rest = place % (TOGETHER * row_tiles)
    return first + rest % size, rest // size


@triton.jit
def weight_row(line, outputs, ACTIVATION: tl.constexpr):
    """Return the row of the weight that belongs to line `line` of a tile's outputs.

    With a gated activation, rows of gate and up alternate in a tile. `outputs` is the number of the weight's rows;
    lines beyond the last row get the last row.
    """
    if ACTIVATION == "none":
        return tl.minimum(line, outputs - 1)
    else:
        return tl.minimum(line // 2, outputs // 2 - 1) + line % 2 * (outputs // 2)


@triton.jit
def multiplied(weight, x, sums, PRECISION: tl.constexpr):
    """Add the product of weight and x to `sums`, for a weight tile (lines, inputs) and a tile of x (inputs, rows)."""
    if x.dtype == tl.int8:
        return tl.dot(weight, x, sums, out_dtype=tl.int32)
    elif x.dtype.is_fp8():
        # The tensor cores of compute capability 9.0 accumulate fp8 products with few bits. Their sums are moved to
        # float32 every 128 inputs, as in the report of DeepSeek-V3
        return tl.dot(weight, x, sums, max_num_imprecise_acc=min(x.shape[0], 128))
    else:
        return tl.dot(weight, x, sums, input_precision=PRECISION)


@triton.jit
def segment_sums(
    weight_at, x_at, first, end, inputs,
    SUM: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the product of weight and x, (LINES, ROWS), summed over the inputs [first, end).

    - weight_at (LINES, INPUTS), x_at (INPUTS, ROWS): pointers to the first tile's values.
    - inputs: number of all inputs. EVEN: `inputs` is a multiple of INPUTS. SUM: dtype of the sums.
    """
    sums = tl.zeros((LINES, ROWS), SUM)
    at = tl.arange(0, INPUTS)
    weight_at += first
    x_at += first
    for start in range(first, end, INPUTS):
        if EVEN:
            weight = tl.load(weight_at)
            x = tl.load(x_at)
        else:
            weight = tl.load(weight_at, mask=(start + at < inputs)[None, :], other=0.0)
            x = tl.load(x_at, mask=(start + at < inputs)[:, None], other=0.0)
        sums = multiplied(weight, x, sums, PRECISION)
        weight_at += INPUTS
        x_at += INPUTS
    return sums


@triton.jit
def block_segment_sums(
    weight_at, x_at, scales_at, group_scales_at, has_scale, first, end, inputs, group_stride,
    EVEN: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the product of an fp8 weight and x, (LINES, ROWS) float32, summed over the inputs [first, end).

    The values of weight and x have one scale per block.

    - weight_at (LINES, INPUTS), x_at (INPUTS, ROWS): pointers to the first tile's values.
    - EVEN: `inputs` is a multiple of INPUTS.
    - scales_at (LINES,), group_scales_at (ROWS,): pointers to the scales of lines and rows for the first INPUTS inputs;
      group_stride: distance to the next scales of rows. has_scale (ROWS,): as in `sums_of`.
    """
    sums = tl.zeros((LINES, ROWS), tl.float32)
    at = tl.arange(0, INPUTS)
    weight_at += first
    x_at += first
    scales_at += first // INPUTS
    group_scales_at += (first // INPUTS) * group_stride
    for start in range(first, end, INPUTS):
        # Loaded before the product, to overlap with it
        scale = tl.load(scales_at)
        if has_scale is None:
            row_scale = tl.load(group_scales_at)
        else:
            row_scale = tl.load(group_scales_at, mask=has_scale, other=0.0)
        if EVEN:
            weight = tl.load(weight_at)
            x = tl.load(x_at)
        else:
            weight = tl.load(weight_at, mask=(start + at < inputs)[None, :], other=0.0)
            x = tl.load(x_at, mask=(start + at < inputs)[:, None], other=0.0)
        made = tl.dot(weight, x, max_num_imprecise_acc=INPUTS)
        sums = tl.fma(made, scale[:, None] * row_scale[None, :], sums)
        scales_at += 1
        group_scales_at += group_stride
        weight_at += INPUTS
        x_at += INPUTS
    return sums


@triton.jit
def sums_of(
    weight_at, x_at, from_row, scale_row, has_scale, first, end, inputs,
    block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
    SUM: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the product of weight and x, (LINES, ROWS), summed over the inputs [first, end).

    Block scales are applied if lines_ptr is not None.

    - weight_at, x_at, SUM, EVEN: as in `segment_sums`.
    - from_row (LINES,): the rows of the weight.
    - scale_row (ROWS,): column of each row's scales in group_scales_ptr. has_scale (ROWS,): False for rows beyond the
      last one, whose scales are not read; None: all are read.
    - block_scales_ptr, lines_ptr, group_scales_ptr, group_stride: as in `matmul_kernel`.
    """
    if lines_ptr is None:
        return segment_sums(weight_at, x_at, first, end, inputs, SUM, EVEN, PRECISION, LINES, ROWS, INPUTS)
    else:
        block = tl.load(lines_ptr + from_row).to(tl.int64)
        scales_at = block_scales_ptr + block * tl.cdiv(inputs, INPUTS)
        group_scales_at = group_scales_ptr + scale_row
        return block_segment_sums(
            weight_at, x_at, scales_at, group_scales_at, has_scale, first, end, inputs, group_stride.to(tl.int64),
            EVEN, LINES, ROWS, INPUTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "segment", "group_stride"])
def matmul_kernel(
    x_ptr, weight_ptr, scales_ptr, row_scales_ptr, bias_ptr, block_scales_ptr, lines_ptr, group_scales_ptr, y_ptr,
    parts_ptr, rows, outputs, inputs, stride_x, stride_weight, stride_y, segment, group_stride,
    SUM: tl.constexpr, EVEN: tl.constexpr, IN_TURN: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    TOGETHER: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows by one tile of outputs per program: over all inputs, or one segment if sums are split.

    - scales_ptr, row_scales_ptr, bias_ptr: scales of outputs and rows, and bias; each may be None.
    - block_scales_ptr (blocks, groups of inputs), lines_ptr (outputs,), group_scales_ptr (groups of inputs, rows):
      scales of the weight's blocks, the block of each output, and scales of x; all or none. group_stride: row stride of
      group_scales.
    - parts_ptr (splits, outputs, rows): receives the sums of segments; None: sums are not split.
    - segment: number of tiles of inputs per segment. IN_TURN: one program computes all segments in turn.
    - LINES, ROWS, INPUTS: numbers of outputs, rows and inputs of a tile. EVEN: `inputs` is a multiple of INPUTS. SUM:
      dtype of sums.
    """
    line_tiles, row_tiles = tl.cdiv(outputs, LINES), tl.cdiv(rows, ROWS)
    line_tile, row_tile = tile_place(tl.program_id(0), line_tiles, row_tiles, TOGETHER)
    line = line_tile * LINES + tl.arange(0, LINES)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, INPUTS)
    from_row = weight_row(line, outputs, ACTIVATION).to(tl.int64)
    weight_at = weight_ptr + from_row[:, None] * stride_weight + at[None, :]
    read_row = tl.minimum(row, rows - 1)
    x_at = x_ptr + read_row.to(tl.int64)[None, :] * stride_x + at[:, None]
    # Counted from the tile's first row, all scales of a thread have constant distances to one address. One address for
    # each scale would exceed the registers
    scale_row = tl.arange(0, ROWS)
    has_scale = scale_row < rows - row_tile * ROWS
    if group_scales_ptr is not None:
        group_scales_ptr += row_tile * ROWS
    if IN_TURN:
        sums = tl.zeros((LINES, ROWS), SUM)
        for first in range(0, inputs, segment * INPUTS):
            end = tl.minimum(first + segment * INPUTS, inputs)
            sums += sums_of(
                weight_at, x_at, from_row, scale_row, has_scale, first, end, inputs,
                block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
                SUM, EVEN, PRECISION, LINES, ROWS, INPUTS,
            )  # fmt: skip
    else:
        first = tl.program_id(1) * segment * INPUTS
        end = tl.minimum(first + segment * INPUTS, inputs)
        sums = sums_of(
            weight_at, x_at, from_row, scale_row, has_scale, first, end, inputs,
            block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
            SUM, EVEN, PRECISION, LINES, ROWS, INPUTS,
        )  # fmt: skip
    give(
        sums, line_tile * LINES, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, parts_ptr,
        rows, outputs, stride_y, line_tiles * LINES, row_tiles * ROWS, ACTIVATION, LINES, ROWS,
    )  # fmt: skip


@triton.jit
def give(
    sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, parts_ptr,
    rows, outputs, stride_y, all_lines, all_rows,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a tile's sums (LINES, ROWS) to `parts_ptr` if sums are split; else finish them and write them to y_ptr.

    `all_lines` and `all_rows` are the numbers of outputs and rows in `parts_ptr`, padded to tiles; the other arguments
    are as in `finish`.
    """
    if parts_ptr is not None:
        line = tl.program_id(1).to(tl.int64) * all_lines + first_line + tl.arange(0, LINES)
        tl.store(parts_ptr + line[:, None] * all_rows + row[None, :], sums)
    else:
        finish(
            sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
            ACTIVATION, LINES, ROWS,
        )  # fmt: skip


@triton.jit
def finish(
    sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply scales, bias and gated activation to a tile's sums (LINES, ROWS), round them, and write them to y_ptr.

    - first_line: first output of the tile. row (ROWS,): the rows of x.
    - scales_ptr, row_scales_ptr, bias_ptr: scales of outputs and rows, and bias; each may be None.
    - rows, outputs: numbers of rows of x and outputs of the weight; values of the tile beyond them are not written.
    """
    if LINES * ROWS > FINISHED_SUMS:
        left, right = tl.split(tl.permute(tl.reshape(sums, (LINES, 2, ROWS // 2)), (0, 2, 1)))
        left_row, right_row = tl.split(tl.permute(tl.reshape(row, (2, ROWS // 2)), (1, 0)))
        finish_part(
            left, first_line, left_row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
            ACTIVATION, LINES, ROWS // 2,
        )  # fmt: skip
        finish_part(
            right, first_line, right_row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
            ACTIVATION, LINES, ROWS // 2,
        )  # fmt: skip
    else:
        finish_part(
            sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
            ACTIVATION, LINES, ROWS,
        )  # fmt: skip


@triton.jit
def finish_part(
    sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Finish and write sums (LINES, ROWS), with the arguments of `finish`."""
    line = first_line + tl.arange(0, LINES)
    from_row = weight_row(line, outputs, ACTIVATION)
    values = sums.to(tl.float32)
    if scales_ptr is not None:
        scale = tl.load(scales_ptr + from_row)[:, None]
        if row_scales_ptr is not None:
            scale = tl.load(row_scales_ptr + tl.minimum(row, rows - 1))[None, :] * scale
        values = values * scale
    if bias_ptr is not None:
        values += tl.load(bias_ptr + from_row).to(tl.float32)[:, None]
    if ACTIVATION == "none":
        columns = outputs
        column = line
    else:
        columns = outputs // 2
        column = first_line // 2 + tl.arange(0, LINES // 2)
        gate, up = tl.split(tl.permute(tl.reshape(values, (LINES // 2, 2, ROWS)), (0, 2, 1)))
        values = gate_factor(gate, ACTIVATION) * up_factor(up, ACTIVATION)
    y_at = y_ptr + row.to(tl.int64)[None, :] * stride_y + column[:, None]
    mask = (row < rows)[None, :] & (column < columns)[:, None]
    tl.store(y_at, values.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "splits"])
def add_parts_kernel(
    parts_ptr, scales_ptr, row_scales_ptr, bias_ptr, y_ptr,
    rows, outputs, stride_y, all_lines, all_rows, splits,
    ACTIVATION: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the sums of one tile over all `splits` segments, in order, and finish them as `finish` does.

    parts_ptr is (splits, all_lines, all_rows); the tile has LINES outputs and ROWS rows.
    """
    first_line = tl.program_id(0) * LINES
    line = first_line + tl.arange(0, LINES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = parts_ptr + line.to(tl.int64)[:, None] * all_rows + row[None, :]
    sums = tl.zeros((LINES, ROWS), parts_ptr.dtype.element_ty)
    for _split in range(splits):
        sums += tl.load(at)
        at += all_lines.to(tl.int64) * all_rows
    finish(
        sums, first_line, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, rows, outputs, stride_y,
        ACTIVATION, LINES, ROWS,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of a product whose operands are float8 with one scale per block.

    Attributes:
        scales: (blocks, groups of 128 inputs) float32, scales of the weight.
        lines: (N,) int32, the row of `scales` that each output uses.
        group_scales: (groups of 128 inputs, T) float32, scales of x.
    """

    scales: Tensor
    lines: Tensor
    group_scales: Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """The checked operands of a product of x and a weight.

    Attributes:
        x: (T, K), maybe quantised.
        weight: one row per output, maybe quantised or packed.
        outputs: N, the number of outputs of the weight.
        out_dtype: dtype of the result.
        scales: (N,) float32, scale of each output; None: not quantised per output.
        row_scales: (T,) float32, scale of each row of x; None: not quantised per row.
        bias: (N,), or None.
        activation: gated activation of the result, or None.
        blocks: the scales of float8 operands with one scale per block, or None.
    """

    x: Tensor
    weight: Tensor
    outputs: int
    out_dtype: torch.dtype
    scales: Tensor | None = None
    row_scales: Tensor | None = None
    bias: Tensor | None = None
    activation: Activation | None = None
    blocks: BlockScales | None = None

    @property
    def rows(self) -> int:
        """Return T, the number of rows of x."""
        return self.x.shape[0]

    @property
    def inputs(self) -> int:
        """Return K, the number of inputs."""
        return self.x.shape[1]


def multiply(operands: Operands, kind: Kind, deterministic: bool) -> Tensor:
    """Multiply x by a weight that is not packed, with `matmul_kernel`: (T, N), or (T, N / 2) with an activation.

    Args:
        operands: x and the weight.
        kind: kind of operands, such as "half" or "int8", by which tiles are chosen.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
    """
    blocks = operands.blocks
    more = {
        "block_scales_ptr": None if blocks is None else blocks.scales,
        "lines_ptr": None if blocks is None else blocks.lines,
        "group_scales_ptr": None if blocks is None else blocks.group_scales,
        "group_stride": 0 if blocks is None else blocks.group_scales.stride(0),
    }
    return launch(matmul_kernel, operands, kind, deterministic, None if blocks is None else GROUP, **more)


def launch(
    kernel: Any, given: Operands, kind: Kind, deterministic: bool, span: int | None = None, **more: Any
) -> Tensor:
    """Run a matmul kernel with the arguments of `matmul_kernel`, and add up the segments if sums are split.

    If the weight's rows are aligned but the rows of x are not, x is copied: tiles then depend only on the weight.

    Args:
        kernel: the Triton kernel, which may have further arguments.
        given: x and the weight.
        kind: kind of operands, such as "half" or "int8", by which tiles are chosen.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
        span: required number of inputs per tile, if weights are packed or scaled in units of it; None: any number.
        more: further arguments of the kernel.

    Returns:
        (T, N), or (T, N / 2) with an activation.
    """
    unit_columns(x=given.x, weight=given.weight)
    columns = given.outputs if given.activation is None else given.outputs // 2
    y = torch.empty(given.rows, columns, dtype=given.out_dtype, device=given.x.device)
    if y.numel() == 0:
        return y
    processors = target.processors(given.x.device)
    sizes = (given.outputs, given.rows, max(1, given.inputs))
    aligned = is_aligned(given.weight, given.weight.stride(0)) and is_aligned(given.x, given.inputs)
    if aligned and not is_aligned(given.x, given.x.stride(0)):
        given = replace(given, x=given.x.contiguous())
    split = choose_split(kind, *sizes, deterministic, processors, span, aligned)
    tiles = split.tiles
    line_tiles, row_tiles = cdiv(given.outputs, tiles.outputs), cdiv(given.rows, tiles.rows)
    parts = _parts(given, split, line_tiles * tiles.outputs, row_tiles * tiles.rows)
    kernel[(line_tiles * row_tiles, split.splits)](
        **_arguments(given, split, y, parts), **more, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    if parts is not None:
        _add_parts(given, parts, y)
    return y


def is_aligned(values: Tensor, pitch: int) -> bool:
    """Return True if rows that are aligned to 16 bytes stay so with a stride of `pitch` values.

    Args:
        values: a tensor with the dtype of the rows.
        pitch: number of values from one row to the next.
    """
    return pitch * values.element_size() % 16 == 0


def _arguments(given: Operands, split: ProductSplit, y: Tensor, parts: Tensor | None) -> dict[str, Any]:
    return {
        "x_ptr": given.x,
        "weight_ptr": given.weight,
        **_finishing(given, y),
        "parts_ptr": parts,
        "inputs": given.inputs,
        "stride_x": given.x.stride(0),
        "stride_weight": given.weight.stride(0),
        "segment": split.segment // split.tiles.inputs,
        "SUM": tl.int32 if given.x.dtype == torch.int8 else tl.float32,
        "EVEN": given.inputs % split.tiles.inputs == 0,
        "IN_TURN": split.in_turn,
        "PRECISION": "ieee" if given.x.dtype == torch.float32 else "tf32",  # matters for float32 only
        "TOGETHER": TOGETHER,
        "LINES": split.tiles.outputs,
        "ROWS": split.tiles.rows,
        "INPUTS": split.tiles.inputs,
    }


def _finishing(given: Operands, y: Tensor) -> dict[str, Any]:
    return {
        "scales_ptr": given.scales,
        "row_scales_ptr": given.row_scales,
        "bias_ptr": None if given.bias is None else given.bias.contiguous(),
        "y_ptr": y,
        "rows": given.rows,
        "outputs": given.outputs,
        "stride_y": y.stride(0),
        "ACTIVATION": given.activation or "none",
    }


def _parts(given: Operands, split: ProductSplit, lines: int, rows: int) -> Tensor | None:
    if split.splits == 1:
        return None
    dtype = torch.int32 if given.x.dtype == torch.int8 else torch.float32
    return torch.empty(split.splits, lines, rows, dtype=dtype, device=given.x.device)


def _add_parts(given: Operands, parts: Tensor, y: Tensor) -> None:
    splits, lines, rows = parts.shape
    width = gcd(rows, PART_ROWS)  # rows are whole tiles, maybe narrower than PART_ROWS
    add_parts_kernel[(lines // PART_LINES, rows // width)](
        parts_ptr=parts, **_finishing(given, y), all_lines=lines, all_rows=rows, splits=splits,
        LINES=PART_LINES, ROWS=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
