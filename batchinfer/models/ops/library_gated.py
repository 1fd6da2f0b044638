"""Gate and up with their activation in one launch, by quack-kernels (Dao-AILab, CuTe DSL), an optional package.

cuBLAS writes gate and up to memory, from which a kernel reads them and writes half as many values: its epilogue does
not multiply one column with another. quack's does, for a weight with all of gate's rows above all of up's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import ActivatedLinear, Linear
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.target import architecture

CAPABILITIES = ("90", "100")
DTYPES = (torch.bfloat16, torch.float16)
UNIT = 8  # values of 16 bytes, of which rows of all three matrices are multiples
# quack's names of activations that it computes as batchinfer does: its swiglu_oai clamps nothing
ACTIVATIONS: dict[Activation, str] = {"silu": "swiglu", "gelu_tanh": "geglu"}


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
