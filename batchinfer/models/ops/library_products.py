"""Matrix products by libraries that are faster than batchinfer's kernels for some numbers of rows.

torch's `scaled_mm` (cuBLASLt and CUTLASS) multiplies float8 weights, and its `grouped_mm` (CUTLASS) experts in
bfloat16. The optional package quack-kernels (Dao-AILab, CuTe DSL) computes gate and up with their activation in one
launch. cuBLAS would write gate and up to memory, since its epilogue cannot multiply one column with another.
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
# The unit of a weight's outputs and inputs, and of rows if groups of inputs have scales
FP8_UNIT = 16
SCALE_UNIT = 4  # the unit of groups in a column of scales of blocks
CAPABILITIES = ("90", "100")
UNIT = 8  # the unit of row lengths of all matrices: 16 bytes
# quack's names of activations that it computes as batchinfer does: its swiglu_oai clamps nothing
ACTIVATIONS: dict[Activation, str] = {"silu": "swiglu", "gelu_tanh": "geglu"}


# torch 2.11 to 2.13 require these layouts (aten/src/ATen/native/cuda/ScaledBlas.cpp): x is stored by rows and the
# weight by columns, both with a multiple of 16 values. Float32 scales are per row, (tokens, 1) and (1, outputs). On
# compute capability 9, they may also be per group of 128 inputs, (tokens, groups) by columns, and per block, (groups
# rounded up to a multiple of 4, outputs / 128) by columns. torch does not check that cuBLAS needs a multiple of 8 rows
# for scales of groups (its manual says 4, NVIDIA's TransformerEngine found 8), so rows are padded to a multiple of 16
class LibraryFp8:
    """The matrix product with a float8 weight by torch's `scaled_mm`.

    Attributes:
        dtype: The dtype of activations.
    """

    def __init__(
        self, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, blocks: bool
    ) -> None:
        """Create the product from tensors in the layouts that `scaled_mm` requires.

        Args:
            codes: (outputs, inputs), the float8 values.
            scales: (1, outputs), a scale per output; or a scale per block, in the layout of `scaled_mm`.
            bias: (outputs,). None: there is none.
            dtype: The dtype of activations.
            blocks: True if scales are per block.
        """
        self._codes, self._scales, self._bias, self._blocks = codes, scales, bias, blocks
        self.dtype = dtype

    @classmethod
    def of(cls, weight: CodedWeight, bias: Tensor | None, dtype: torch.dtype) -> LibraryFp8 | None:
        """Return torch's product with a float8 weight; None if torch or the GPU does not support it.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
            dtype: The dtype of activations.
        """
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
        """Quantise x by rows or groups, and return its product with the weight, (tokens, outputs) in x's dtype.

        Args:
            x: (tokens, inputs).
        """
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
    blocks, groups = scales.shape
    padded = scales.new_zeros(blocks, -(-groups // SCALE_UNIT) * SCALE_UNIT, dtype=torch.float32)
    padded[:, :groups] = scales
    return padded.t()


class LibraryGated:
    """A gated layer act(gate) * up, computed in one launch by the library quack-kernels."""

    def __init__(self, weight: Tensor, activation: str) -> None:
        """Create the product with a weight that `of` accepts.

        Args:
            weight: (2 * outputs, inputs), gate before up.
            activation: quack's name of the activation.
        """
        self._weight, self._activation = weight, activation
        self.dtype = weight.dtype

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, activation: Activation) -> LibraryGated | None:
        """Return quack's product act(gate) * up.

        Returns None if quack is not installed, or it or the GPU does not support the product.

        Args:
            weight: (2 * outputs, inputs), gate before up.
            bias: None, as quack supports no bias; for another value, the result is None.
            activation: The activation of the gate.
        """
        outputs, inputs = weight.shape
        fits = weight.is_contiguous() and not inputs % UNIT and not outputs % (2 * UNIT)
        if bias is not None or activation not in ACTIVATIONS or weight.dtype not in DTYPES or not fits:
            return None
        if architecture() not in CAPABILITIES or importlib.util.find_spec("quack") is None:
            return None
        return cls(weight, ACTIVATIONS[activation])

    def __call__(self, x: Tensor) -> Tensor:
        """Return act(gate) * up, (tokens, outputs).

        Args:
            x: (tokens, inputs).
        """
        interface: Any = importlib.import_module("quack.gemm_interface")
        y: Tensor = interface.gemm_gated(
            x,
            self._weight.t(),
            activation=self._activation,
            store_preact=False,
            tuned=False,  # the search for the best tile would compile dozens of kernels per number of rows
            concat_layout=("B",),
        )[1]
        return y


class ChosenGated(ActivatedLinear):
    """A gated layer with two implementations: two launches, and one launch of a library for many rows.

    `least_library_rows` is the minimum number of rows for the library; see `LibraryChoice`.
    """

    library_name = "quack-kernels"

    def __init__(self, ops: Ops, inner: Linear, activation: Activation, fused: LibraryGated) -> None:
        """Combine two implementations of a gated layer.

        Args:
            ops: The operators, which apply the activation after `inner`.
            inner: The linear layer of gate and up.
            activation: The activation of the gate.
            fused: The library's product.
        """
        super().__init__(inner, inner.out_features // 2, ops.gated_activation, activation)
        self._fused = fused
        self.least_library_rows: int | None = None

    @property
    def form(self) -> str:
        """Return a text with all properties of the layer that its duration depends on; see `LibraryChoice.form`."""
        kind = str(self._fused.dtype).removeprefix("torch.")
        return f"gate and up in {kind}, {2 * self.out_features} x {self.in_features}, {self._activation}"

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return two functions that compute the layer for random rows: in two launches, and by the library.

        Args:
            rows: The number of rows.
            device: The device of the layer.
        """
        x = torch.randn(rows, self.in_features, dtype=self._fused.dtype, device=device)
        return lambda: super(ChosenGated, self).__call__(x), lambda: self._fused(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Return act(gate) * up, (tokens, out_features), for x, (tokens, in_features)."""
        least = self.least_library_rows
        return self._fused(x) if least is not None and len(x) >= least else super().__call__(x)


# aten/src/ATen/native/GroupedMMUtils.h: on some GPUs, torch multiplies expert by expert
class LibraryGrouped:
    """The matrix products of gated experts in bfloat16 by torch's `grouped_mm`.

    On GPUs of compute capability 9.0 and 10.0, CUDA graphs can capture it. On others, the host waits for the number of
    rows of each expert.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, activation: Activation) -> None:
        """Create the products from weights that `of` accepts.

        Args:
            gate_up: (experts, 2 * inner, hidden), gate before up.
            down: (experts, hidden, inner).
            activation: The activation of the gate.
        """
        self._gate_up, self._down, self._activation = gate_up, down, activation

    @classmethod
    def of(cls, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> LibraryGrouped | None:
        """Return torch's products for gated experts; None if torch or the GPU does not support them.

        Args:
            gate_up: The weights of each expert's first product, gate before up.
            down: The weights of each expert's second product.
            activation: The activation of the gate.
        """
        if not hasattr(F, "grouped_mm") or architecture() not in CAPABILITIES:
            return None
        for weights in (gate_up, down):
            values = weights.weight
            plain = weights.scales is None and weights.bias is None and values.dtype == torch.bfloat16
            if not plain or not values.is_contiguous() or any(size % UNIT for size in values.shape[1:]):
                return None
        return cls(gate_up.weight, down.weight, activation)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Return the results of the experts for rows that are sorted by expert, (rows, hidden).

        Rows after the rows of the last expert have undefined values.

        Args:
            x: (tokens, hidden) bfloat16.
            rows: The tokens of the rows, and the first row of each expert.
        """
        ends = rows.starts[1:].to(torch.int32)
        given = x.index_select(0, rows.tokens)
        both = F.grouped_mm(given, self._gate_up.transpose(1, 2), offs=ends)
        inner = gated_activation(both, self._activation)
        return F.grouped_mm(inner, self._down.transpose(1, 2), offs=ends)
