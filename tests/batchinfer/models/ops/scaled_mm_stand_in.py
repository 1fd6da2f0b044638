"""A function in the place of torch's `scaled_mm`, as strict about shapes, dtypes, strides and layouts as torch is on a
GPU (aten/src/ATen/native/cuda/ScaledBlas.cpp), and about numbers of rows as cuBLAS is, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

FP8 = torch.float8_e4m3fn
ROWS = (ScalingType.RowWise, ScalingType.RowWise)
BLOCKS = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)


class ScaledMM:
    """A call; `calls` counts them. `capability`: of the GPU in whose place it is; `offset` is added to results."""

    def __init__(self, capability: int = 90, offset: float = 0.0) -> None:
        self.capability, self.offset, self.calls = capability, offset, 0

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_recipe_a: ScalingType,
        scale_b: Tensor,
        scale_recipe_b: ScalingType,
        swizzle_a: None = None,
        swizzle_b: None = None,
        bias: Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        (rows, inputs), outputs = mat_a.shape, mat_b.shape[1]
        _demand(mat_a.dtype == mat_b.dtype == FP8 and mat_b.shape[0] == inputs, "both are float8, and fit")
        _demand(mat_a.stride() == (inputs, 1), "the first is row-major")
        _demand(mat_b.stride() == (1, inputs), "the second is column-major")
        _demand(inputs % 16 == 0 and outputs % 16 == 0, "sizes are multiples of 16")
        _demand(scale_a.dtype == scale_b.dtype == torch.float32, "scales are float32")
        _demand(output_dtype in (torch.bfloat16, torch.float16, torch.float32), "of an output dtype")
        _demand(
            bias is None or (bias.dtype == output_dtype != torch.float32 and bias.shape == (outputs,)),
            "a bias fits",
        )
        recipes = (scale_recipe_a, scale_recipe_b)
        if recipes == ROWS:
            _demand(
                scale_a.shape == (rows, 1) and scale_b.shape == (1, outputs), "scales of rows have shapes"
            )
            _demand(scale_b.stride(1) == 1, "scales of columns lie side by side")
            wide_a, wide_b = scale_a, scale_b
        else:
            _demand(recipes == BLOCKS, "recipes are known together")
            wide_a, wide_b = self._widened(scale_a, scale_b, rows, inputs, outputs)
        self.calls += 1
        y = (mat_a.float() * wide_a) @ (mat_b.float() * wide_b) + self.offset
        return (y if bias is None else y + bias.float()).to(output_dtype)

    def _widened(
        self, scale_a: Tensor, scale_b: Tensor, rows: int, inputs: int, outputs: int
    ) -> tuple[Tensor, Tensor]:
        if self.capability // 10 != 9:
            raise NotImplementedError(
                "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90"
            )
        _demand(rows % 8 == 0, "rows are a multiple of 8, or cuBLAS has no algorithm")
        groups, blocks = -(-inputs // 128), -(-outputs // 128)
        padded = -(-groups // 4) * 4
        _demand(scale_a.shape == (rows, groups), "scales of groups have a shape")
        _demand(scale_a.stride(0) == 1 and _steps(scale_a, rows), "scales of groups are column-major")
        _demand(scale_b.shape == (padded, blocks), "scales of blocks have a shape, with padding")
        _demand(scale_b.stride(0) == 1 and _steps(scale_b, padded), "scales of blocks are column-major")
        of_a = scale_a.repeat_interleave(128, 1)[:, :inputs]
        of_b = scale_b[:groups].repeat_interleave(128, 0)[:inputs].repeat_interleave(128, 1)[:, :outputs]
        return of_a, of_b


def _steps(scales: Tensor, wanted: int) -> bool:
    return scales.stride(1) == wanted or (scales.shape[1] == 1 and scales.stride(1) == 1)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"it is not so that {what}")
