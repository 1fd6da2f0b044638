"""Products by libraries that are faster than our kernels for some numbers of rows.

float8 codes by torch's `scaled_mm` (cuBLASLt and CUTLASS), and experts in bfloat16 by its `grouped_mm` (CUTLASS). Gate
and up with their activation in one launch by quack-kernels (Dao-AILab, CuTe DSL), an optional package: cuBLAS writes
gate and up to memory, from which a kernel reads them and writes half as many values. Its epilogue does not multiply one
column with another; quack's does, for a weight with all of gate's rows above all of up's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import ActivatedLinear, CodedWeight, ExpertWeights, Linear
from batchinfer_kernels.block_fp8_matmul import GROUP
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.quantize_rows import quantize_groups_fp8, quantize_rows_fp8
from batchinfer_kernels.gpu.sort_by_expert import ExpertRows
from batchinfer_kernels.gpu.target import architecture

FIRST_WITH_ROWS = 89
WITH_BLOCKS = range(90, 100)
DTYPES = (torch.bfloat16, torch.float16)
# Values that both sides of a weight are multiples of, and rows where groups of inputs have scales
FP8_UNIT = 16
SCALE_UNIT = 4  # groups that columns of scales of blocks are multiples of
CAPABILITIES = ("90", "100")
UNIT = 8  # values of 16 bytes, of which rows of all matrices are multiples
# quack's names of activations that it computes as batchinfer does: its swiglu_oai clamps nothing
ACTIVATIONS: dict[Activation, str] = {"silu": "swiglu", "gelu_tanh": "geglu"}


class LibraryFp8:
    """The library's product with a weight of float8 codes, for activations of `dtype`.

    What it wants of layouts is what torch 2.11 to 2.13 check (aten/src/ATen/native/cuda/ScaledBlas.cpp): x by rows and
    the weight by columns, both of a multiple of 16 values; float32 scales, of rows (T, 1) and (1, N), or of groups of
    128 inputs, (T, groups) by columns, and of blocks, (groups rounded up to 4, N / 128) by columns, on compute
    capability 9. What cuBLAS wants beyond that torch does not check: with scales of groups as many rows as a multiple
    of 8 (its manual says 4; NVIDIA's TransformerEngine has found 8), so that they are filled up to 16.
    """

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
            or outputs % FP8_UNIT
            or inputs % FP8_UNIT
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
            missing = -len(x) % FP8_UNIT
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


class LibraryGated:
    """The library's product of one weight, with the gate in its epilogue."""

    def __init__(self, weight: Tensor, activation: str) -> None:
        self._weight, self._activation = weight, activation
        self.dtype = weight.dtype

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, activation: Activation) -> LibraryGated | None:
        """Return the product with a weight (2 × out, in), gate above up; None where the package is not installed, or
        has no such product."""
        outputs, inputs = weight.shape
        fits = weight.is_contiguous() and not inputs % UNIT and not outputs % (2 * UNIT)
        if bias is not None or activation not in ACTIVATIONS or weight.dtype not in DTYPES or not fits:
            return None
        if architecture() not in CAPABILITIES or importlib.util.find_spec("quack") is None:
            return None
        return cls(weight, ACTIVATIONS[activation])

    def __call__(self, x: Tensor) -> Tensor:
        """(T, in) → (T, out). The tile is the one that quack names for any product: its search would compile some
        dozens for each number of rows."""
        interface: Any = importlib.import_module("quack.gemm_interface")
        y: Tensor = interface.gemm_gated(
            x,
            self._weight.t(),
            activation=self._activation,
            store_preact=False,
            tuned=False,
            concat_layout=("B",),
        )[1]
        return y


class ChosenGated(ActivatedLinear):
    """A gated layer that is computed in two launches, or in one by the library; see LibraryChoice."""

    library_name = "quack-kernels"

    def __init__(self, ops: Ops, inner: Linear, activation: Activation, fused: LibraryGated) -> None:
        super().__init__(inner, inner.out_features // 2, ops.gated_activation, activation)
        self._fused = fused
        self.least_library_rows: int | None = None

    @property
    def form(self) -> str:
        """Return what the time of a product depends on, as a name."""
        kind = str(self._fused.dtype).removeprefix("torch.")
        return f"gate and up in {kind}, {2 * self.out_features} x {self.in_features}, {self._activation}"

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return the layer's result for so many random rows in two launches, and by the library."""
        x = torch.randn(rows, self.in_features, dtype=self._fused.dtype, device=device)
        return lambda: super(ChosenGated, self).__call__(x), lambda: self._fused(x)

    def __call__(self, x: Tensor) -> Tensor:
        least = self.least_library_rows
        return self._fused(x) if least is not None and len(x) >= least else super().__call__(x)


class LibraryGrouped:
    """The library's products of gated experts, whose weights are (experts, out, in) bfloat16.

    It reads where groups end from the device, so that a graph can replay it, on compute capability 9.0 and 10.0 alone.
    On other GPUs torch multiplies group by group, and the host waits for where they end
    (aten/src/ATen/native/GroupedMMUtils.h).
    """

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    @classmethod
    def of(cls, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> LibraryGrouped | None:
        """Return the products; None where the library, or this GPU, has none."""
        if not hasattr(F, "grouped_mm") or architecture() not in CAPABILITIES:
            return None
        for weights in (gate_up, down):
            values = weights.weight
            plain = weights.scales is None and weights.bias is None and values.dtype == torch.bfloat16
            if not plain or not values.is_contiguous() or any(size % UNIT for size in values.shape[1:]):
                return None
        return cls(gate_up.weight, down.weight, activation)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """x: (T, hidden) bfloat16 → the results of the sorted rows, (R, hidden); those behind the last expert's are
        anything."""
        ends = rows.starts[1:].to(torch.int32)
        given = x.index_select(0, rows.tokens)
        both = F.grouped_mm(given, self._gate_up.transpose(1, 2), offs=ends)
        inner = gated_activation(both, self._activation)
        return F.grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
