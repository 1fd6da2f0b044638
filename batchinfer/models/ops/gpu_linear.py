"""Linear layers of a GPU: the vendor's matrix products, and kernels where these cannot do it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.layers import (
    AdapterRoom,
    Adapters,
    AddedValues,
    CodedWeight,
    Factors,
    Head,
    Linear,
)
from batchinfer.models.ops.library_products import LibraryFp8
from batchinfer.models.ops.torch_ops import TorchLinear
from batchinfer_kernels.block_fp8_matmul import BlockWeight
from batchinfer_kernels.cost import PANEL_BYTES, Peaks, least_panel_rows, widening_cost
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.block_fp8_matmul import block_fp8_matmul
from batchinfer_kernels.gpu.fp8_matmul import fp8_matmul
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.gpu.int8_matmul import int8_matmul
from batchinfer_kernels.gpu.matmul import matmul
from batchinfer_kernels.gpu.quantized_matmul import int4_weight_matmul, mxfp4_matmul, panel_matmul
from batchinfer_kernels.gpu.sample import sample
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.mxfp4 import GROUP as MXFP4_GROUP
from batchinfer_kernels.mxfp4 import Mxfp4Weight, pack_mxfp4_weight
from batchinfer_kernels.quantized_matmul import Int4Weight, pack_int4_weight

HeadWeight = TypeVar("HeadWeight", Tensor, CodedWeight)
MIN_RANK = 16  # of factors: the least inner dimension of a tile


class LibraryLinear(TorchLinear):
    """The weight as it was loaded, multiplied by cuBLAS or hipBLAS."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class SampledHead(Head, Generic[HeadWeight]):
    """A head whose greatest logits the kernel that samples finds."""

    def __init__(self, weight: HeadWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight: HeadWeight = weight

    def argmax(self, x: Tensor) -> Tensor:
        return sample(self(x))


class LibraryHead(SampledHead[Tensor]):
    """The library's sums as they are, in float32: rounded to the weight's dtype, near logits would become equal."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), self._weight.float())


class LibraryExact(Linear):
    """The library's product in float32, for a layer that is no head."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._head, self._bias = LibraryHead(weight), None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        y = self._head(x)
        return y if self._bias is None else y + self._bias


class KernelLinear(Linear):
    """A product by a kernel that may have a gate behind it."""

    def __init__(self, shape: torch.Size | tuple[int, int], activation: Activation | None) -> None:
        self.out_features, self.in_features = shape
        self.out_features //= 1 if activation is None else 2
        self._activation = activation

    @abstractmethod
    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        """(T, in) → (T, out), with this activation behind the sums."""

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        y, gate = added.add_to(self._product(x, None)), self._activation
        return y if gate is None else gated_activation(y, gate)


class TritonAdapters(Adapters):
    """Grouped products of all tokens, sorted by their adapter: those without one have factors of zeros, so that what is
    launched depends on the number of tokens alone. Ranks are rounded up to the greatest one. With `room` factors wait
    in pinned memory, from which they are copied into their places."""

    def __init__(
        self, factors: Sequence[Factors | None], deterministic: bool, room: AdapterRoom | None = None
    ) -> None:
        known = [own for own in factors if own is not None]
        rank = max(MIN_RANK, *(len(own.a) for own in known))
        (_, inputs), outputs, first = known[0].a.shape, len(known[0].b), known[0].a
        device = first.device if room is None else room.device
        count = 1 + (len(factors) if room is None else room.places)
        self._a = first.new_zeros(count, rank, inputs, device=device)
        self._b = first.new_zeros(count, outputs, rank, device=device)
        self._kept = [*factors] if room is None or device.type == "cpu" else [*map(_pinned, factors)]
        self._deterministic = deterministic
        if room is None:
            for number in range(1, count):
                self.place(number, number)
            self._kept.clear()

    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        how = self._deterministic
        low = grouped_matmul(x, self._a, rows.starts, from_rows=rows.order, deterministic=how)
        return AddedValues(grouped_matmul(low, self._b, rows.starts, deterministic=how), rows)

    def place(self, number: int, place: int) -> None:
        own, a, b = self._kept[number - 1], self._a[place], self._b[place]
        rank = 0 if own is None else len(own.a)
        a[rank:].zero_()
        b[:, rank:].zero_()
        # Copies run in the order of the steps, so that those before are done with the place
        if own is not None:
            a[:rank].copy_(own.a, non_blocking=True)
            b[:, :rank].copy_(own.b, non_blocking=True)


def _pinned(own: Factors | None) -> Factors | None:
    """Return factors in memory that a GPU reads while the host goes on."""
    return None if own is None else Factors(own.a.pin_memory(), own.b.pin_memory())


class InvariantLinear(KernelLinear):
    """A row's bits do not depend on the other rows; see batchinfer_kernels.gpu.matmul."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        super().__init__(weight.shape, activation)
        self._weight, self._bias = weight, bias

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        return matmul(x, self._weight, self._bias, activation=activation, deterministic=True)


class InvariantHead(SampledHead[Tensor]):
    """A head whose logits are row-invariant float32 sums."""

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self._weight, out_dtype=torch.float32, deterministic=True)


class InvariantExact(Linear):
    """Float32 results of a layer that is no head."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self._weight, self._bias, out_dtype=torch.float32, deterministic=True)


class Int8Linear(KernelLinear):
    """A product of int8 values: each row of x is quantised when it comes. Sums are exact: a row does not depend on
    others."""

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None, activation: Activation | None = None
    ) -> None:
        super().__init__(weight.shape, activation)
        self._weight, self._bias = weight, bias

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        codes, scales = self._weight.codes, self._weight.scales
        return int8_matmul(x, codes, scales, self._bias, activation=activation)


class Int8Head(SampledHead[CodedWeight]):
    """A head whose weight is quantised to int8, with float32 logits."""

    def __call__(self, x: Tensor) -> Tensor:
        return int8_matmul(x, self._weight.codes, self._weight.scales, out_dtype=torch.float32)


class Fp8Linear(KernelLinear):
    """A product of float8_e4m3fn values, by our kernel, or by the library from some number of rows on, if it was found
    to be faster. Each row of x, or each group of a row, is quantised when it comes."""

    library_name = "torch"

    def __init__(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        activation: Activation | None,
        deterministic: bool,
        library: LibraryFp8 | None = None,
    ) -> None:
        super().__init__(weight.shape, activation)
        self._codes, self._scales, self._bias = weight.codes, weight.scales, bias
        self._blocks = None if weight.lines is None else BlockWeight(self._codes, self._scales, weight.lines)
        self._deterministic = deterministic
        self.library = library
        self.least_library_rows: int | None = None

    @property
    def form(self) -> str:
        """Return what the time of a product depends on, as a name."""
        scales = "rows" if self._blocks is None else "blocks"
        behind = "" if self._activation is None else f", {self._activation}"
        biased = "" if self._bias is None else ", bias"
        return f"float8 by {scales}, {len(self._codes)} x {self.in_features}{biased}{behind}"

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return the layer's result for so many random rows by our kernel, and by the library; see LibraryChoice."""
        assert self.library is not None, "it can be multiplied by both"
        x = torch.randn(rows, self.in_features, dtype=self.library.dtype, device=device)
        gate = self._activation
        return lambda: self._by_kernel(x, gate), lambda: self._by_library(x, gate)

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        least = self.least_library_rows
        many = least is not None and len(x) >= least
        return self._by_library(x, activation) if many else self._by_kernel(x, activation)

    def _by_kernel(self, x: Tensor, gate: Activation | None) -> Tensor:
        how = self._deterministic
        if self._blocks is not None:
            return block_fp8_matmul(x, self._blocks, self._bias, activation=gate, deterministic=how)
        return fp8_matmul(x, self._codes, self._scales, self._bias, activation=gate, deterministic=how)

    def _by_library(self, x: Tensor, gate: Activation | None) -> Tensor:
        assert self.library is not None, "it was asked before it was chosen"
        y = self.library(x)
        return y if gate is None else gated_activation(y, gate)


class Fp8Head(SampledHead[CodedWeight]):
    """A head whose weight is quantised to fp8, with float32 logits."""

    def __init__(self, weight: CodedWeight, deterministic: bool) -> None:
        super().__init__(weight)
        self._deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = self._weight.codes, self._weight.scales
        return fp8_matmul(x, codes, scales, out_dtype=torch.float32, deterministic=self._deterministic)


class WeightPanel:
    """Room for the values of a weight, or of a part of its outputs, which all layers of a model in 4 bits use one after
    the other. It is allocated while weights are packed, so that it stands where it is once steps are captured."""

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def reserve(self, weight: Int4Weight | Mxfp4Weight, dtype: torch.dtype) -> None:
        """Make room for values of the whole weight, or for PANEL_BYTES of it, and for one output at the least."""
        outputs = weight.outputs
        most = max(1, PANEL_BYTES // dtype.itemsize // max(1, weight.inputs))
        values = min(outputs, most) * weight.inputs
        if self._values is None or self._values.numel() < values:
            self._values = None  # not both at once
            self._values = torch.empty(values, dtype=dtype, device=weight.packed.device)

    @property
    def values(self) -> Tensor:
        assert self._values is not None, "a weight was packed before it is multiplied"
        return self._values


class WidenedLinear(KernelLinear):
    """A product with values of 4 bits, int4 or MXFP4, x as it is: few rows multiply them as they are widened in
    registers, many rows the library's way, once they are widened into the panel. Where it is `deterministic` all rows
    are few.

    `peaks`: of the GPU, which say how many rows are many. Raises ValueError for groups that the kernels do not have.
    """

    def __init__(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        activation: Activation | None,
        dtype: torch.dtype,
        panel: WeightPanel | None,
        peaks: Peaks,
    ) -> None:
        """`panel`: None where the product is deterministic."""
        packed: Int4Weight | Mxfp4Weight
        if weight.mxfp4:
            packed = pack_mxfp4_weight(weight.codes, weight.scales)
            group, zeros, scale_bytes = MXFP4_GROUP, False, 1
        else:
            packed = pack_int4_weight(weight.codes, weight.scales, weight.zeros, weight.group, dtype)
            group, zeros, scale_bytes = packed.group, packed.zeros is not None, dtype.itemsize
        super().__init__((packed.outputs, packed.inputs), activation)
        self._weight, self._bias, self._panel = packed, bias, panel
        sizes = packed.inputs, packed.outputs, dtype.itemsize
        widened = widening_cost(*sizes, group=group, zeros=zeros, scale_bytes=scale_bytes)
        self.many = least_panel_rows(peaks, *sizes, widened)
        if panel is not None:
            panel.reserve(packed, dtype)

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        panel, gate = self._panel, activation
        if panel is None or len(x) < self.many:
            return self._by_few(x, gate, panel is None)
        y = panel_matmul(x, self._weight, self._bias, panel.values)
        return y if gate is None else gated_activation(y, gate)

    def _by_few(self, x: Tensor, gate: Activation | None, fixed: bool) -> Tensor:
        """Multiply with values that are widened in registers."""
        weight = self._weight
        if isinstance(weight, Int4Weight):
            return int4_weight_matmul(x, weight, self._bias, activation=gate, deterministic=fixed)
        return mxfp4_matmul(x, weight, self._bias, activation=gate, deterministic=fixed)
