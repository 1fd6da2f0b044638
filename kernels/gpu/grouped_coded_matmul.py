"""Linear layers of experts with MXFP4 or int4 weights, for rows that are sorted by expert.

Cost: cost.mxfp4_grouped_linear_cost and int4_grouped_linear_cost. Rows are tiled as in grouped_matmul. Weights are
widened in registers. MXFP4 is exact in bfloat16, so the result is the same as with a weight that was widened before and
summed in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu import target
from batchinfer_kernels.gpu.checks import check_same_dtype, unit_columns
from batchinfer_kernels.gpu.grouped_matmul import expert_of_tile, rows_of_tile, tile_ends
from batchinfer_kernels.gpu.matmul_core import TOGETHER, finish, is_aligned, tile_place, weight_row
from batchinfer_kernels.gpu.matmul_tiles import grouped_tiles
from batchinfer_kernels.gpu.quantized_matmul import coded_segment_sums
from batchinfer_kernels.gpu.sizes import cdiv, next_power_of_2
from batchinfer_kernels.mxfp4 import GROUP, Mxfp4Weights
from batchinfer_kernels.quantized_matmul import SPAN, Int4Weights


@triton.jit(do_not_specialize=["row_tiles"])
def grouped_coded_matmul_kernel(
    x_ptr, from_ptr, weight_ptr, groups_ptr, zeros_ptr, bias_ptr, y_ptr, starts_ptr, ends_ptr, experts, row_tiles,
    outputs, inputs, stride_x, stride_expert, stride_weight, stride_groups, stride_y,
    EVEN: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
    EXPERTS: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of rows of one expert by a tile of its packed weight's outputs per program.

    - from_ptr: for each row sorted by expert, the row of x; None: x is sorted.
    - groups_ptr (experts, groups, outputs): int4 scales, or MXFP4 exponents as uint8. zeros_ptr: zero points, or None.
    - starts_ptr (experts + 1,): first row of each expert. ends_ptr (experts,): end of each expert's row tiles.
    - EVEN: `inputs` is a multiple of INPUTS. LINES, ROWS, INPUTS: numbers of outputs, rows and inputs of a tile.
    """
    line_tile, row_tile = tile_place(tl.program_id(0), tl.cdiv(outputs, LINES), row_tiles, TOGETHER)
    expert, inside = expert_of_tile(ends_ptr, experts, row_tile, row_tiles, EXPERTS)
    if expert < experts:
        row, read, end = rows_of_tile(starts_ptr, from_ptr, expert, inside, ROWS)
        line = line_tile * LINES + tl.arange(0, LINES)
        at = tl.arange(0, INPUTS // 4)
        from_row = weight_row(line, outputs, ACTIVATION).to(tl.int64)
        weight_at = weight_ptr + expert.to(tl.int64) * stride_expert
        weight_at += from_row[:, None] * stride_weight + at[None, :]
        x_at = x_ptr + read.to(tl.int64)[None, :] * stride_x + at[:, None]
        groups_ptr += expert.to(tl.int64) * stride_groups
        if zeros_ptr is not None:
            zeros_ptr += expert.to(tl.int64) * stride_groups
        sums = coded_segment_sums(
            weight_at, x_at, from_row, 0, inputs, inputs, outputs, groups_ptr, zeros_ptr,
            EVEN, PRECISION, GROUP, LINES, ROWS, INPUTS,
        )  # fmt: skip
        if bias_ptr is not None:
            bias_ptr += expert.to(tl.int64) * outputs
        finish(
            sums, line_tile * LINES, row, None, None, bias_ptr, y_ptr, end, outputs, stride_y,
            ACTIVATION, LINES, ROWS,
        )  # fmt: skip


def grouped_mxfp4_matmul(
    x: Tensor,
    weights: Mxfp4Weights,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    from_rows: Tensor | None = None,
    ends: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Multiply rows sorted by expert by the MXFP4 weights of their experts: (R, N), or (R, N / 2) with an activation.

    float32 is multiplied without tensor cores.

    Args:
        x: (R, K), or (any, K) with `from_rows`; rows may be strided.
        weights: packed weights of E experts with N outputs.
        starts: (E + 1,) int64, the first row of each expert, and R at the end.
        bias: (E, N), or None.
        activation: gated activation of the result, or None.
        from_rows: (R,) int64, row r is x[from_rows[r]]; None: x has the R rows.
        ends: `ExpertRows.ends` from gpu.sort_by_expert, the number of tiles of rows up to each expert; None: computed.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    given = _Coded(weights.packed, weights.exponents, None, weights.inputs, GROUP)
    return _launch(x, given, starts, bias, activation, from_rows, ends, deterministic)


def grouped_int4_matmul(
    x: Tensor,
    weights: Int4Weights,
    starts: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    from_rows: Tensor | None = None,
    ends: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Multiply rows sorted by expert by the int4 weights of their experts: (R, N), or (R, N / 2) with an activation.

    Args:
        x: (R, K), or (any, K) with `from_rows`; rows may be strided.
        weights: packed weights of E experts with N outputs; scales have x's dtype.
        starts: (E + 1,) int64, the first row of each expert, and R at the end.
        bias: (E, N), or None.
        activation: gated activation of the result, or None.
        from_rows: (R,) int64, row r is x[from_rows[r]]; None: x has the R rows.
        ends: `ExpertRows.ends` from gpu.sort_by_expert, the number of tiles of rows up to each expert; None: computed.
        deterministic: True if a row's bits must not depend on the number of rows; see gpu.matmul.
    """
    if weights.scales.dtype != x.dtype:
        raise ValueError(f"scales are {weights.scales.dtype}, x is {x.dtype}")
    given = _Coded(weights.packed, weights.scales, weights.zeros, weights.inputs, weights.group)
    return _launch(x, given, starts, bias, activation, from_rows, ends, deterministic)


@dataclass(frozen=True, slots=True)
class _Coded:
    packed: Tensor
    groups: Tensor  # scales or exponents, (experts, groups, N)
    zeros: Tensor | None  # zero points, (experts, groups, N)
    inputs: int
    group: int

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, outputs, _ = self.packed.shape
        return experts, outputs, self.inputs


def _launch(
    x: Tensor,
    weights: _Coded,
    starts: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    from_rows: Tensor | None,
    ends: Tensor | None,
    deterministic: bool,
) -> Tensor:
    _check(x, weights, starts, bias, activation)
    experts, outputs, inputs = weights.shape
    rows = len(x if from_rows is None else from_rows)
    y = x.new_empty(rows, outputs if activation is None else outputs // 2)
    if y.numel() == 0:
        return y
    words, wide = weights.packed.view(torch.int16), x.dtype == torch.float32
    even = is_aligned(x, inputs)  # depends only on the weights, and so do the tiles
    if even and not is_aligned(x, x.stride(0)):
        x = x.contiguous()
    tiles = grouped_tiles(
        "wide" if wide else "coded",
        outputs,
        rows,
        experts,
        deterministic,
        target.processors(x.device),
        even,
        SPAN,
    )
    # An expert has at most one tile that is not full
    row_tiles = min(experts, rows) + max(0, rows - experts) // tiles.rows
    grouped_coded_matmul_kernel[(cdiv(outputs, tiles.outputs) * row_tiles,)](
        x, from_rows, words, weights.groups, weights.zeros, None if bias is None else bias.contiguous(),
        y, starts, tile_ends(starts, tiles.rows, ends),
        experts, row_tiles, outputs, inputs, x.stride(0), words.stride(0), words.stride(1),
        weights.groups.stride(0), y.stride(0),
        EVEN=inputs % SPAN == 0, ACTIVATION=activation or "none", PRECISION="ieee" if wide else "tf32",
        TOGETHER=TOGETHER, EXPERTS=next_power_of_2(experts), GROUP=weights.group, LINES=tiles.outputs, ROWS=tiles.rows,
        INPUTS=tiles.inputs, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _check(
    x: Tensor, weights: _Coded, starts: Tensor, bias: Tensor | None, activation: Activation | None
) -> None:
    unit_columns(x=x)
    check_same_dtype(x=x)
    experts, outputs, inputs = weights.shape
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"x is {tuple(x.shape)}, the weights are {weights.shape}")
    if bias is not None and bias.shape != (experts, outputs):
        raise ValueError(f"bias is {tuple(bias.shape)}, the weights are {weights.shape}")
    if starts.shape != (experts + 1,) or starts.is_floating_point():
        raise ValueError(f"starts are {tuple(starts.shape)} {starts.dtype}, there are {experts} weights")
    if activation is not None and outputs % 2:
        raise ValueError(f"gate and up need an even number of rows, the weights have {outputs}")
