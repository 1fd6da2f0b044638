"""Products of float8 codes by torch's `scaled_mm` (cuBLASLt and CUTLASS), which is faster than our kernel for some
numbers of rows.

What it wants of layouts is what torch 2.11 to 2.13 check (aten/src/ATen/native/cuda/ScaledBlas.cpp): x by rows and the
weight by columns, both of a multiple of 16 values; float32 scales, of rows (T, 1) and (1, N), or of groups of 128
inputs, (T, groups) by columns, and of blocks, (groups rounded up to 4, N / 128) by columns, on compute capability 9.
What cuBLAS wants beyond that torch does not check: with scales of groups as many rows as a multiple of 8 (its manual
says 4; NVIDIA's TransformerEngine has found 8), so that they are filled up to 16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.layers import CodedWeight
from batchinfer_kernels.block_fp8_matmul import GROUP
from batchinfer_kernels.gpu.quantize_rows import quantize_groups_fp8, quantize_rows_fp8
from batchinfer_kernels.gpu.target import architecture

FIRST_WITH_ROWS = 89
WITH_BLOCKS = range(90, 100)
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 16  # values that both sides of a weight are multiples of, and rows where groups of inputs have scales
SCALE_UNIT = 4  # groups that columns of scales of blocks are multiples of


class LibraryFp8:
    """The library's product with a weight of float8 codes, for activations of `dtype`."""

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, blocks: bool
    ) -> None:
        """codes: (N, K); scales: (1, N), or of blocks, as the library wants them."""
        self._codes, self._scales, self._bias, self._blocks = codes, scales, bias, blocks
        self.dtype = dtype

    @classmethod
    def of(cls, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype) -> LibraryFp8 | None:
        """Return the product for activations of `dtype`; None where the library, or this GPU, has none."""
        found, (outputs, inputs) = architecture(), weight.codes.shape
        if not hasattr(F, "scaled_mm") or not found.isdigit() or int(found) < FIRST_WITH_ROWS:
            return None
        if (
            dtype not in DTYPES
            or outputs % UNIT
            or inputs % UNIT
            or (bias is not None and bias.dtype != dtype)
        ):
            return None
        codes = weight.codes.contiguous()
        if weight.lines is None:
            return cls(codes, weight.scales.float().contiguous()[None, :], bias, dtype, False)
        whole = torch.arange(outputs, device=codes.device) // GROUP
        if int(found) not in WITH_BLOCKS or not torch.equal(weight.lines.long(), whole):
            return None
        return cls(codes, _by_columns(weight.scales), bias, dtype, True)

    def __call__(self, x: Tensor) -> Tensor:
        """(T, K) → (T, N) in x's dtype. Rows, or groups of them, are quantised by our kernel."""
        kinds: Any = F.ScalingType
        if self._blocks:
            missing = -len(x) % UNIT
            codes, scales = quantize_groups_fp8(F.pad(x, (0, 0, 0, missing)) if missing else x)
            given, recipes = scales.t(), (kinds.BlockWise1x128, kinds.BlockWise128x128)
        else:
            codes, scales = quantize_rows_fp8(x)
            given, recipes = scales[:, None], (kinds.RowWise, kinds.RowWise)
        multiply: Any = F.scaled_mm
        y: Tensor = multiply(
            codes,
            self._codes.t(),
            given,
            recipes[0],
            self._scales,
            recipes[1],
            bias=self._bias,
            output_dtype=x.dtype,
        )
        return y[: len(x)]


def _by_columns(scales: Tensor) -> Tensor:
    """(blocks of outputs, groups) → (groups and padding, blocks of outputs), column by column."""
    blocks, groups = scales.shape
    padded = scales.new_zeros(blocks, -(-groups // SCALE_UNIT) * SCALE_UNIT, dtype=torch.float32)
    padded[:, :groups] = scales
    return padded.t()
