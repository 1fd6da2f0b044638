"""Linear layers of experts, for rows that are sorted by expert.

Cost: cost.grouped_linear_cost, quantized_grouped_linear_cost and block_fp8_grouped_linear_cost.

A tile of rows belongs to one expert. The number of tiles is known only on the device, so the grid has the most possible
tiles. A program looks up its expert in the ends of the experts' tiles, and exits if there is none. The host does not
synchronise, and a graph can replay the launch.

If `deterministic`, a row's bits do not depend on the number of rows or on its position; see gpu.matmul. The tile is
always the same, and sums are not split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.block_fp8_matmul import GROUP
from batchinfer_kernels.fp8_matmul import FP8
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import target
from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.fp8_matmul import why_not_fp8
from batchinfer_kernels.gpu.matmul_core import (
    TOGETHER,
    BlockScales,
    finish,
    is_aligned,
    sums_of,
    tile_place,
    weight_row,
)
from batchinfer_kernels.gpu.matmul_tiles import Kind, Tiles, grouped_tiles
from batchinfer_kernels.gpu.quantize_rows import quantize_groups_fp8, quantize_rows, quantize_rows_fp8
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.gpu.sort_by_expert import LEAST_HEIGHT
from batchinfer_kernels.grouped_matmul import check_grouped_matmul


@triton.jit
def expert_of_tile(ends_ptr, experts, row_tile, row_tiles, EXPERTS: tl.constexpr):
    """Return the expert of a tile of rows, and the tile's number among the tiles of this expert.

    - ends_ptr (experts,): the cumulative number of row tiles up to each expert.
    - row_tile: number of the tile, below `row_tiles`, the number of launched tiles. For a tile that no expert needs,
      the returned expert is `experts`.
    - EXPERTS: `experts`, rounded up to a power of 2.
    """
    number = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + number, mask=number < experts, other=row_tiles + 1)
    expert = tl.sum((ends <= row_tile).to(tl.int32), 0)
    return expert, (row_tile - tl.max(tl.where(ends <= row_tile, ends, 0), 0)).to(tl.int32)


@triton.jit
def rows_of_tile(starts_ptr, from_ptr, expert, inside, ROWS: tl.constexpr):
    """Return the rows of one tile of an expert's rows.

    Args:
        starts_ptr: first row of each expert, in rows sorted by expert.
        from_ptr: row of x of each row sorted by expert; None: x is sorted.
        expert: number of the expert.
        inside: number of the tile among the tiles of the expert.
        ROWS: number of rows of a tile.

    Returns:
        The rows of the tile (ROWS,), the row of x of each, and the end (exclusive) of the expert's rows.
    """
    end = tl.load(starts_ptr + expert + 1).to(tl.int32)
    row = tl.load(starts_ptr + expert).to(tl.int32) + inside * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(row, end - 1)
    if from_ptr is not None:
        read = tl.load(from_ptr + read)
    return row, read, end


@triton.jit(do_not_specialize=["row_tiles", "group_stride"])
def grouped_matmul_kernel(
    x_ptr, from_ptr, weight_ptr, scales_ptr, row_scales_ptr, bias_ptr, block_scales_ptr, lines_ptr,
    group_scales_ptr, y_ptr, starts_ptr, ends_ptr, experts, row_tiles, outputs, inputs, stride_x, stride_expert,
    stride_weight, stride_y, stride_blocks, group_stride,
    SUM: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    TOGETHER: tl.constexpr, EXPERTS: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows of one expert by a tile of its weight's outputs per program.

    - from_ptr: for each row sorted by expert, the row of x; None: x is sorted.
    - scales_ptr, row_scales_ptr, bias_ptr: scales of outputs and rows, and bias; each may be None.
    - block_scales_ptr, lines_ptr, group_scales_ptr: as in `matmul_kernel`, with block scales per expert.
    - starts_ptr (experts + 1,): first row of each expert. ends_ptr (experts,): end of each expert's row tiles.
    - LINES, ROWS, INPUTS: numbers of outputs, rows and inputs of a tile. EVEN: `inputs` is a multiple of INPUTS. SUM:
      dtype of sums.
    """
    line_tile, row_tile = tile_place(tl.program_id(0), tl.cdiv(outputs, LINES), row_tiles, TOGETHER)
    expert, inside = expert_of_tile(ends_ptr, experts, row_tile, row_tiles, EXPERTS)
    if expert < experts:
        row, read, end = rows_of_tile(starts_ptr, from_ptr, expert, inside, ROWS)
        line = line_tile * LINES + tl.arange(0, LINES)
        at = tl.arange(0, INPUTS)
        weight_at = weight_ptr + expert.to(tl.int64) * stride_expert
        from_row = weight_row(line, outputs, ACTIVATION).to(tl.int64)
        weight_at += from_row[:, None] * stride_weight + at[None, :]
        x_at = x_ptr + read.to(tl.int64)[None, :] * stride_x + at[:, None]
        if block_scales_ptr is not None:
            block_scales_ptr += expert.to(tl.int64) * stride_blocks
        sums = sums_of(
            weight_at, x_at, from_row, read, None, 0, inputs, inputs,
            block_scales_ptr, lines_ptr, group_scales_ptr, group_stride,
            SUM, EVEN, PRECISION, LINES, ROWS, INPUTS,
        )  # fmt: skip
        if scales_ptr is not None:
            scales_ptr += expert.to(tl.int64) * outputs
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * outputs
        finish(
            sums, line_tile * LINES, row, scales_ptr, row_scales_ptr, bias_ptr, y_ptr, end, outputs, stride_y,
            ACTIVATION, LINES, ROWS,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Operands:
    x: Tensor
    weight: Tensor
    starts: Tensor
    rows: int
    from_rows: Tensor | None
    ends: Tensor | None
    out_dtype: torch.dtype
    scales: Tensor | None
    row_scales: Tensor | None
    bias: Tensor | None
    activation: Activation | None
    blocks: BlockScales | None


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Tensor | None = None,
    lines: Tensor | None = None,
    activation: Activation | None = None,
    from_rows: Tensor | None = None,
    ends: Tensor | None = None,
    deterministic: bool = False,
    hadamard: bool = False,
) -> Tensor:
    """Multiply rows sorted by expert by the weights of their experts, as `grouped_matmul_reference` does.

    float32 is multiplied without tensor cores. int8 products are always deterministic, because integer sums are exact.

    Args:
        x: (R, K), or (any, K) with `from_rows`; rows may be strided.
        weight: (E, N, K) of x's dtype, or int8 or float8_e4m3fn values with `scales`.
        starts: (E + 1,) int64, the first row of each of E experts, and R at the end.
        bias: (E, N), or None.
        scales: (E, N) float32, of a quantised weight; with `lines` (E, S, ceil(K / 128)), as in BlockWeight.
        lines: (N,) int32, BlockWeight.lines, for a weight with one scale per block.
        activation: gated activation of the result, or None.
        from_rows: (R,) int64, row r is x[from_rows[r]]; None: x has the R rows.
        ends: `ExpertRows.ends` from gpu.sort_by_expert, the number of tiles of rows up to each expert; None: computed.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
        hadamard: True if an int8 weight was transformed; see `quantize_weight`.

    Returns:
        (R, N), or (R, N / 2) with an activation.

    Raises:
        ValueError: If shapes or dtypes do not match, or for float8_e4m3fn on a GPU that does not support it.
    """
    check_grouped_matmul(x, weight, starts, bias, scales, activation, lines)
    unit_columns(x=x, weight=weight)
    check_same_dtype(x=x, **({"weight": weight} if scales is None else {}))
    dtype, kind, rows = x.dtype, _kind(x, weight, lines), len(x if from_rows is None else from_rows)
    row_scales, blocks = None, None
    scales = None if scales is None else scales.contiguous()
    if lines is not None and scales is not None:
        _refuse_without_fp8()
        x, group_scales = quantize_groups_fp8(x)
        blocks = BlockScales(scales, lines.contiguous(), group_scales)
        scales = None
    elif scales is not None:
        x, row_scales = _coded_rows(x, kind, hadamard)
        row_scales = row_scales if from_rows is None else row_scales[from_rows]
    bias = None if bias is None else bias.contiguous()
    given = _Operands(
        x, weight, starts, rows, from_rows, ends, dtype, scales, row_scales, bias, activation, blocks
    )
    return _launch(given, kind, deterministic)


def _kind(x: Tensor, weight: Tensor, lines: Tensor | None) -> Kind:
    if weight.dtype == FP8:
        return "fp8" if lines is None else "block_fp8"
    if weight.dtype == torch.int8:
        return "int8"
    return "wide" if x.dtype == torch.float32 else "half"


def _coded_rows(x: Tensor, kind: Kind, hadamard: bool) -> tuple[Tensor, Tensor]:
    if kind == "int8":
        return quantize_rows(x, hadamard)
    _refuse_without_fp8()
    return quantize_rows_fp8(x)


def _refuse_without_fp8() -> None:
    missing = why_not_fp8()
    if missing is not None:
        raise ValueError(missing)


def _launch(given: _Operands, kind: Kind, deterministic: bool) -> Tensor:
    experts, outputs, _ = given.weight.shape
    columns = outputs if given.activation is None else outputs // 2
    y = torch.empty(given.rows, columns, dtype=given.out_dtype, device=given.x.device)
    if y.numel() == 0:
        return y
    aligned = all(
        is_aligned(values, pitch)
        for values, pitch in (
            (given.weight, given.weight.stride(1)),
            (given.weight, given.weight.stride(0)),
            (given.x, given.x.stride(0)),
        )
    )
    processors = target.processors(given.x.device)
    span = None if given.blocks is None else GROUP
    sizes = (outputs, given.rows, experts)
    tiles = grouped_tiles(kind, *sizes, deterministic, processors, aligned, span)
    # An expert has at most one tile that is not full
    row_tiles = min(experts, given.rows) + max(0, given.rows - experts) // tiles.rows
    ends = tile_ends(given.starts, tiles.rows, given.ends)
    grid = (cdiv(outputs, tiles.outputs) * row_tiles,)
    grouped_matmul_kernel[grid](
        **_arguments(given, tiles, y, ends), row_tiles=row_tiles, num_warps=tiles.warps,
        num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def tile_ends(starts: Tensor, rows: int, ends: Tensor | None = None) -> Tensor:
    """Return the cumulative number of row tiles up to each expert: (experts,) int64.

    Args:
        starts: (experts + 1,), the first row of each expert in rows sorted by expert, and their number.
        rows: number of rows of a tile.
        ends: `ExpertRows.ends`, which contains the result; None: it is computed.
    """
    if ends is not None:
        return ends[(rows // LEAST_HEIGHT).bit_length() - 1]
    return (starts.diff().add_(rows - 1) // rows).cumsum(0)


def _arguments(given: _Operands, tiles: Tiles, y: Tensor, ends: Tensor) -> dict[str, Any]:
    experts, outputs, inputs = given.weight.shape
    blocks = given.blocks
    return {
        "x_ptr": given.x,
        "from_ptr": given.from_rows,
        "weight_ptr": given.weight,
        "scales_ptr": given.scales,
        "row_scales_ptr": given.row_scales,
        "bias_ptr": given.bias,
        "block_scales_ptr": None if blocks is None else blocks.scales,
        "lines_ptr": None if blocks is None else blocks.lines,
        "group_scales_ptr": None if blocks is None else blocks.group_scales,
        "y_ptr": y,
        "starts_ptr": given.starts,
        "ends_ptr": ends,
        "experts": experts,
        "outputs": outputs,
        "inputs": inputs,
        "stride_x": given.x.stride(0),
        "stride_expert": given.weight.stride(0),
        "stride_weight": given.weight.stride(1),
        "stride_y": y.stride(0),
        "stride_blocks": 0 if blocks is None else blocks.scales.stride(0),
        "group_stride": 0 if blocks is None else blocks.group_scales.stride(0),
        "SUM": tl.int32 if given.x.dtype == torch.int8 else tl.float32,
        "EVEN": inputs % tiles.inputs == 0,
        "ACTIVATION": given.activation or "none",
        "PRECISION": "ieee" if given.x.dtype == torch.float32 else "tf32",  # matters for float32 only
        "TOGETHER": TOGETHER,
        "EXPERTS": next_power_of_2(experts),
        "LINES": tiles.outputs,
        "ROWS": tiles.rows,
        "INPUTS": tiles.inputs,
    }
