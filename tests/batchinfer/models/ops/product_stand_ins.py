"""Fake matrix products of GPU libraries: they check arguments as strictly, and compute in float32."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

FP8 = torch.float8_e4m3fn
ROWS = (ScalingType.RowWise, ScalingType.RowWise)
BLOCKS = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)


class ScaledMM:
    """A fake `scaled_mm` that checks shapes, dtypes, strides and layouts like torch
    (aten/src/ATen/native/cuda/ScaledBlas.cpp), and row counts like cuBLAS.

    Attributes:
        calls: number of calls.
        capability: of the imitated GPU.
        offset: added to results.
    """

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
        raise ValueError(f"not true: {what}")


class Quack(ModuleType):
    """A fake quack.gemm_interface of version 0.6.5, as strict about a gated product as its kernels.

    Attributes:
        calls: rows of each call.
    """

    def __init__(self) -> None:
        super().__init__("quack.gemm_interface")
        self.calls: list[int] = []
        self.broken: Exception | None = None
        self.error = 0.0  # of results

    def gemm_gated(
        self, A: Tensor, B: Tensor, C: None = None, bias: None = None, activation: str | None = None, *,
        store_preact: bool = True, tuned: bool = True, concat_layout: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        if self.broken is not None:
            raise self.broken
        assert activation in ("swiglu", "geglu"), "others are no names, or compute something else"
        assert concat_layout == ("B",), "gate's and up's rows would be taken to alternate"
        assert not tuned, "a search for the best tile compiles for minutes"
        assert not store_preact, "gate and up would be written after all"
        assert C is bias is None
        assert A.dtype == B.dtype
        assert A.dtype in (torch.bfloat16, torch.float16)
        assert A.dim() == B.dim() == 2
        assert A.shape[1] == B.shape[0]
        assert A.stride(1) == 1
        assert A.stride(0) % 8 == 0
        assert B.stride(0) == 1, "B is the transposed weight, and not a copy"
        assert B.stride(1) % 8 == 0
        assert B.shape[1] % 16 == 0
        assert A.data_ptr() % 16 == B.data_ptr() % 16 == 0
        self.calls.append(len(A))
        gate, up = (A.float() @ B.float()).chunk(2, 1)
        active = F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return None, (active * up * (1 + self.error)).to(A.dtype)


class GroupedMM:
    """A fake grouped_mm of rows with one weight per group, as strict as torch on a GPU.

    Rows outside of all groups become NaN.

    Attributes:
        calls: rows of each call.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        *,
        offs: Tensor | None = None,
        bias: None = None,
        out_dtype: None = None,
    ) -> Tensor:
        assert mat_a.dtype == mat_b.dtype == torch.bfloat16
        assert mat_a.dim() == 2
        assert mat_b.dim() == 3
        assert mat_a.shape[1] == mat_b.shape[1]
        assert mat_a.stride(1) == 1
        assert mat_a.stride(0) >= mat_a.shape[1]
        assert mat_a.stride(0) % 8 == 0
        assert mat_b.stride(1) == 1, "the weights are column-major"
        assert mat_b.stride(2) >= mat_b.shape[1]
        assert mat_b.stride(2) % 8 == 0
        assert mat_a.data_ptr() % 16 == mat_b.data_ptr() % 16 == 0
        assert bias is out_dtype is None
        assert offs is not None
        assert offs.dtype == torch.int32
        assert offs.shape == mat_b.shape[:1]
        assert bool((offs.diff() >= 0).all())
        assert int(offs[-1]) <= len(mat_a)
        self.calls.append(len(mat_a))
        y = torch.full((len(mat_a), mat_b.shape[2]), float("nan"), dtype=torch.bfloat16)
        first = 0
        for end, weight in zip(offs.tolist(), mat_b, strict=True):
            y[first:end] = (mat_a[first:end].float() @ weight.float()).bfloat16()
            first = end
        return y
