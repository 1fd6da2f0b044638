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
from batchinfer_kernels.gpu.matmul_tiles import Cut, Kind, choose_cut
from batchinfer_kernels.gpu.sizes import cdiv

# Tiles of outputs in a group, which keeps the rows and weights that they read in the L2 cache
TOGETHER = 8
# The tile of `add_parts_kernel`, small enough to fill the GPU if there are few outputs
PART_LINES, PART_ROWS = 32, 64


@triton.jit
def tile_place(place, line_tiles, row_tiles, TOGETHER: tl.constexpr):
    """Return (tile of outputs, tile of rows) of a program. Each group of output tiles runs over all rows."""
    group = place // (TOGETHER * row_tiles)
    first = group * TOGETHER
    size = tl.minimum(line_tiles - first, TOGETHER)
    rest = place % (TOGETHER * row_tiles)
    return first + rest % size, rest // size


@triton.jit
def weight_row(line, outputs, ACTIVATION: tl.constexpr):
    """Return the row of the weight for a line of the sums. With an activation, gate and up of a result are adjacent."""
    if ACTIVATION == "none":
        return tl.minimum(line, outputs - 1)
    else:
        return tl.minimum(line // 2, outputs // 2 - 1) + line % 2 * (outputs // 2)


@triton.jit
def multiplied(weight, x, sums, PRECISION: tl.constexpr):
    """Return sums + weight x, for (lines, inputs) and (inputs, rows)."""
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
    """Return the sums over the inputs [first, end)."""
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
    weight_at, x_at, scales_at, group_scales_at, first, end, inputs, group_stride,
    EVEN: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the sums over the inputs [first, end) for fp8 with one scale per line and row and tile of inputs."""
    sums = tl.zeros((LINES, ROWS), tl.float32)
    at = tl.arange(0, INPUTS)
    weight_at += first
    x_at += first
    scales_at += first // INPUTS
    group_scales_at += (first // INPUTS) * group_stride
    for start in range(first, end, INPUTS):
        # Loaded before the product, to overlap with it
        scale = tl.load(scales_at)
        row_scale = tl.load(group_scales_at)
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
    weight_at, x_at, from_row, read_row, first, end, inputs,
    block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
    SUM: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the sums over the inputs [first, end); with block scales, a tile has the inputs of one group."""
    if lines_ptr is None:
        return segment_sums(weight_at, x_at, first, end, inputs, SUM, EVEN, PRECISION, LINES, ROWS, INPUTS)
    else:
        block = tl.load(lines_ptr + from_row).to(tl.int64)
        scales_at = block_scales_ptr + block * tl.cdiv(inputs, INPUTS)
        group_scales_at = group_scales_ptr + read_row
        return block_segment_sums(
            weight_at, x_at, scales_at, group_scales_at, first, end, inputs, group_stride.to(tl.int64),
            EVEN, LINES, ROWS, INPUTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "segment", "group_stride"])
def matmul_kernel(
    x_ptr, weight_ptr,
    scales_ptr, row_scales_ptr, bias_ptr,  # each may be None
    block_scales_ptr, lines_ptr,  # (blocks, groups of inputs), and the block of each output; may be None
    group_scales_ptr,  # (groups of inputs, rows); may be None
    y_ptr, parts_ptr,  # parts: None, or (splits, lines, rows), padded to whole tiles
    rows, outputs, inputs, stride_x, stride_weight, stride_y,
    segment,  # tiles of inputs per segment
    group_stride,  # row stride of group_scales
    SUM: tl.constexpr, EVEN: tl.constexpr, IN_TURN: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
    LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile per program: all inputs, or one segment of them if sums are split."""
    line_tiles, row_tiles = tl.cdiv(outputs, LINES), tl.cdiv(rows, ROWS)
    line_tile, row_tile = tile_place(tl.program_id(0), line_tiles, row_tiles, TOGETHER)
    line = line_tile * LINES + tl.arange(0, LINES)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, INPUTS)
    from_row = weight_row(line, outputs, ACTIVATION).to(tl.int64)
    weight_at = weight_ptr + from_row[:, None] * stride_weight + at[None, :]
    read_row = tl.minimum(row, rows - 1)
    x_at = x_ptr + read_row.to(tl.int64)[None, :] * stride_x + at[:, None]
    if IN_TURN:
        sums = tl.zeros((LINES, ROWS), SUM)
        for first in range(0, inputs, segment * INPUTS):
            end = tl.minimum(first + segment * INPUTS, inputs)
            sums += sums_of(
                weight_at, x_at, from_row, read_row, first, end, inputs,
                block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
                SUM, EVEN, PRECISION, LINES, ROWS, INPUTS,
            )  # fmt: skip
    else:
        first = tl.program_id(1) * segment * INPUTS
        end = tl.minimum(first + segment * INPUTS, inputs)
        sums = sums_of(
            weight_at, x_at, from_row, read_row, first, end, inputs,
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
    """Write the sums to the result, or to the part of this program's segment."""
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
    """Apply scales, bias and gate, round once, and write the result."""
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
    """Add up the segments of one tile, in order."""
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
    """The scales of a weight's blocks; see batchinfer_kernels.block_fp8_matmul."""

    scales: Tensor  # (blocks, groups) float32
    lines: Tensor  # (N,) int32
    group_scales: Tensor  # (groups, T) float32


@dataclass(frozen=True, slots=True)
class Operands:
    """The checked operands of a product: x (T, K) and a weight with one row per output, maybe quantised or packed."""

    x: Tensor
    weight: Tensor
    outputs: int
    out_dtype: torch.dtype
    scales: Tensor | None = None  # (N,) float32
    row_scales: Tensor | None = None  # (T,) float32
    bias: Tensor | None = None  # (N,)
    activation: Activation | None = None
    blocks: BlockScales | None = None

    @property
    def rows(self) -> int:
        """Return the number of rows of x."""
        return self.x.shape[0]

    @property
    def inputs(self) -> int:
        """Return the number of inputs."""
        return self.x.shape[1]


def multiply(operands: Operands, kind: Kind, deterministic: bool) -> Tensor:
    """Multiply with `matmul_kernel`. The grid depends only on sizes."""
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
    """Run a kernel with the arguments of matmul_kernel and `more`, and add up the segments if there are several.

    If the weight's rows are aligned but the rows of x are not, x is copied: tiles then depend only on the weight.

    Args:
        kernel: the kernel.
        given: the operands.
        kind: kind of product.
        deterministic: see gpu.matmul.
        span: see choose_cut.
        more: further arguments of the kernel.
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
    cut = choose_cut(kind, *sizes, deterministic, processors, span, aligned)
    tiles = cut.tiles
    line_tiles, row_tiles = cdiv(given.outputs, tiles.outputs), cdiv(given.rows, tiles.rows)
    parts = _parts(given, cut, line_tiles * tiles.outputs, row_tiles * tiles.rows)
    kernel[(line_tiles * row_tiles, cut.splits)](
        **_arguments(given, cut, y, parts), **more, num_warps=tiles.warps, num_stages=tiles.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    if parts is not None:
        _add_parts(given, parts, y)
    return y


def is_aligned(values: Tensor, pitch: int) -> bool:
    """Return True if rows with a stride of `pitch` values keep an alignment of 16 bytes."""
    return pitch * values.element_size() % 16 == 0


def _arguments(given: Operands, cut: Cut, y: Tensor, parts: Tensor | None) -> dict[str, Any]:
    return {
        "x_ptr": given.x,
        "weight_ptr": given.weight,
        **_finishing(given, y),
        "parts_ptr": parts,
        "inputs": given.inputs,
        "stride_x": given.x.stride(0),
        "stride_weight": given.weight.stride(0),
        "segment": cut.segment // cut.tiles.inputs,
        "SUM": tl.int32 if given.x.dtype == torch.int8 else tl.float32,
        "EVEN": given.inputs % cut.tiles.inputs == 0,
        "IN_TURN": cut.in_turn,
        "PRECISION": "ieee" if given.x.dtype == torch.float32 else "tf32",  # matters for float32 only
        "TOGETHER": TOGETHER,
        "LINES": cut.tiles.outputs,
        "ROWS": cut.tiles.rows,
        "INPUTS": cut.tiles.inputs,
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


def _parts(given: Operands, cut: Cut, lines: int, rows: int) -> Tensor | None:
    """Return a buffer for the sums of segments, or None if sums are not split."""
    if cut.splits == 1:
        return None
    dtype = torch.int32 if given.x.dtype == torch.int8 else torch.float32
    return torch.empty(cut.splits, lines, rows, dtype=dtype, device=given.x.device)


def _add_parts(given: Operands, parts: Tensor, y: Tensor) -> None:
    splits, lines, rows = parts.shape
    width = gcd(rows, PART_ROWS)  # rows are whole tiles, maybe narrower than PART_ROWS
    add_parts_kernel[(lines // PART_LINES, rows // width)](
        parts_ptr=parts, **_finishing(given, y), all_lines=lines, all_rows=rows, splits=splits,
        LINES=PART_LINES, ROWS=width, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
