"""Linear layers on a GPU: the vendor's matrix products, and kernels for weights that these do not support."""

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
MIN_RANK = 16  # minimum rank of factors: the smallest inner dimension of a tile


class LibraryLinear(TorchLinear):
    """A linear layer with a float weight on a GPU, multiplied by the vendor's library (cuBLAS or hipBLAS)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features)."""
        return F.linear(x, self._weight, self._bias)


class SampledHead(Head, Generic[HeadWeight]):
    """An output layer (lm_head) on a GPU whose most likely token is found by the sampling kernel."""

    def __init__(self, weight: HeadWeight) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight: HeadWeight = weight

    def argmax(self, x: Tensor) -> Tensor:
        """Return the id with the largest logit in each row, (tokens,); NO_TOKEN for rows that are not finite.

        Args:
            x: (tokens, inputs), normed hidden states.
        """
        return sample(self(x))


class LibraryHead(SampledHead[Tensor]):
    """An output layer (lm_head) with a float weight, multiplied by the vendor's library (cuBLAS or hipBLAS).

    Logits are float32. They are not rounded to the dtype of the weight, as this would make similar logits equal.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 logits (n, vocab) from normed hidden states x, (n, hidden)."""
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), self._weight.float())


class LibraryExact(Linear):
    """A linear layer with float32 results, multiplied by the vendor's library (cuBLAS or hipBLAS)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._head, self._bias = LibraryHead(weight), None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features) in float32."""
        y = self._head(x)
        return y if self._bias is None else y + self._bias


class KernelLinear(Linear):
    """A linear layer computed by one of batchinfer's GPU kernels, which can also apply a gated activation."""

    def __init__(self, shape: torch.Size | tuple[int, int], activation: Activation | None) -> None:
        """Create a linear layer with an optional gated activation.

        Args:
            shape: The shape of the weight, (outputs, inputs).
            activation: The gated activation of the results, which halves their number. None: there is none.
        """
        self.out_features, self.in_features = shape
        self.out_features //= 1 if activation is None else 2
        self._activation = activation

    @abstractmethod
    def _product(self, x: Tensor, activation: Activation | None) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features)."""
        return self._product(x, self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return the layer's results (tokens, outputs) with LoRA: x W^T + b + `added`, then the activation, if any.

        Args:
            x: (tokens, inputs).
            added: The values of the adapters.
        """
        y, gate = added.add_to(self._product(x, None)), self._activation
        return y if gate is None else gated_activation(y, gate)


class TritonAdapters(Adapters):
    """The packed A and B of LoRA adapters for one matrix product on a GPU.

    Kernel launches depend only on the number of tokens, so CUDA graphs can capture them.
    """

    def __init__(
        self, factors: Sequence[Factors | None], deterministic: bool, room: AdapterRoom | None = None
    ) -> None:
        """Pack A and B of adapters for a product.

        Args:
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            deterministic: True if results must not depend on the batch.
            room: How many adapters the device holds at the same time. All adapters are then kept in pinned memory of
                the host, from which `place` copies them. None: the device holds all adapters.
        """
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
        """Return B A x of each token's LoRA adapter; see `Adapters.__call__`."""
        how = self._deterministic
        low = grouped_matmul(x, self._a, rows.starts, from_rows=rows.order, deterministic=how)
        return AddedValues(grouped_matmul(low, self._b, rows.starts, deterministic=how), rows)

    def place(self, number: int, place: int) -> None:
        """Copy A and B of an adapter to the device, over the adapter that has the same place.

        The copy runs after all work that was launched earlier.

        Args:
            number: The number of the adapter, from 1.
            place: The number of the place, from 1.
        """
        own, a, b = self._kept[number - 1], self._a[place], self._b[place]
        rank = 0 if own is None else len(own.a)
        a[rank:].zero_()
        b[:, rank:].zero_()
        # Copies run after launched steps, which may still read the place
        if own is not None:
            a[:rank].copy_(own.a, non_blocking=True)
            b[:, :rank].copy_(own.b, non_blocking=True)


def _pinned(own: Factors | None) -> Factors | None:
    # A GPU copies from pinned memory without a synchronisation of the host
    return None if own is None else Factors(own.a.pin_memory(), own.b.pin_memory())


class InvariantLinear(KernelLinear):
    """A linear layer on a GPU for deterministic jobs: the results of a row do not depend on other rows, bit by bit."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation | None = None) -> None:
        super().__init__(weight.shape, activation)
        self._weight, self._bias = weight, bias

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        return matmul(x, self._weight, self._bias, activation=activation, deterministic=True)


class InvariantHead(SampledHead[Tensor]):
    """An output layer (lm_head) on a GPU for deterministic jobs: a row's float32 logits do not depend on other rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 logits (n, vocab) from normed hidden states x, (n, hidden)."""
        return matmul(x, self._weight, out_dtype=torch.float32, deterministic=True)


class InvariantExact(Linear):
    """A linear layer with float32 results for deterministic jobs: a row does not depend on other rows, bit by bit."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features) in float32."""
        return matmul(x, self._weight, self._bias, out_dtype=torch.float32, deterministic=True)


class Int8Linear(KernelLinear):
    """A linear layer with an int8 weight on a GPU.

    Each row of the input is quantised to int8, too. Integer sums are exact, so the results of a row do not depend on
    other rows.
    """

    def __init__(
        self, weight: CodedWeight, bias: Tensor | None, activation: Activation | None = None
    ) -> None:
        super().__init__(weight.shape, activation)
        self._weight, self._bias = weight, bias

    def _product(self, x: Tensor, activation: Activation | None) -> Tensor:
        weight, bias = self._weight, self._bias
        return int8_matmul(
            x, weight.codes, weight.scales, bias, activation=activation, hadamard=weight.hadamard
        )


class Int8Head(SampledHead[CodedWeight]):
    """An output layer (lm_head) on a GPU whose weight is quantised to int8. Logits are float32."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 logits (n, vocab) from normed hidden states x, (n, hidden)."""
        weight = self._weight
        return int8_matmul(x, weight.codes, weight.scales, out_dtype=torch.float32, hadamard=weight.hadamard)


class Fp8Linear(KernelLinear):
    """A linear layer with a float8_e4m3fn weight.

    batchinfer's kernel computes few rows, and a library may compute many. Each row of the input, or each group of
    values in a row, is quantised to float8, too.

    Attributes:
        library_name: The name of the library, for messages.
        library: The library's product. None: the library does not support the layer.
        least_library_rows: The minimum number of rows for the library. None: the kernel computes all numbers of rows.
    """

    library_name = "torch"

    def __init__(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        activation: Activation | None,
        deterministic: bool,
        library: LibraryFp8 | None = None,
    ) -> None:
        """Create a linear layer with a float8 weight.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
            activation: The gated activation of the results. None: there is none.
            deterministic: True if results must not depend on the batch.
            library: The library's product. None: the library does not support the layer.
        """
        super().__init__(weight.shape, activation)
        self._codes, self._scales, self._bias = weight.codes, weight.scales, bias
        self._blocks = None if weight.lines is None else BlockWeight(self._codes, self._scales, weight.lines)
        self._deterministic = deterministic
        self.library = library
        self.least_library_rows: int | None = None

    @property
    def form(self) -> str:
        """Return a text with all properties of the layer that its duration depends on; see `LibraryChoice.form`."""
        scales = "rows" if self._blocks is None else "blocks"
        gated = "" if self._activation is None else f", {self._activation}"
        biased = "" if self._bias is None else ", bias"
        return f"float8 by {scales}, {len(self._codes)} x {self.in_features}{biased}{gated}"

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return two functions that compute the layer for random rows: by batchinfer's kernel, and by the library.

        Args:
            rows: The number of rows.
            device: The device of the layer.
        """
        assert self.library is not None, "the library supports the layer"
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
        assert self.library is not None, "no library was chosen"
        y = self.library(x)
        return y if gate is None else gated_activation(y, gate)


class Fp8Head(SampledHead[CodedWeight]):
    """An output layer (lm_head) on a GPU whose weight is quantised to float8_e4m3fn. Logits are float32."""

    def __init__(self, weight: CodedWeight, deterministic: bool) -> None:
        super().__init__(weight)
        self._deterministic = deterministic

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 logits (n, vocab) from normed hidden states x, (n, hidden)."""
        codes, scales = self._weight.codes, self._weight.scales
        return fp8_matmul(x, codes, scales, out_dtype=torch.float32, deterministic=self._deterministic)


class WeightPanel:
    """A buffer on a GPU for the dequantised values of a 4-bit weight, or of some of its outputs. All layers share it.

    It is allocated while weights are packed, so that its address does not change after CUDA graphs are captured.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None

    def reserve(self, weight: Int4Weight | Mxfp4Weight, dtype: torch.dtype) -> None:
        """Enlarge the buffer, if necessary, for the dequantised values of a weight.

        For a weight larger than PANEL_BYTES, it only gets this size, or the size of one output if that is larger.

        Args:
            weight: The weight.
            dtype: The dtype of dequantised values.
        """
        outputs = weight.outputs
        most = max(1, PANEL_BYTES // dtype.itemsize // max(1, weight.inputs))
        values = min(outputs, most) * weight.inputs
        if self._values is None or self._values.numel() < values:
            self._values = None  # frees the old buffer before the new one is allocated
            self._values = torch.empty(values, dtype=dtype, device=weight.packed.device)

    @property
    def values(self) -> Tensor:
        """Return the memory of the buffer as a tensor with one dimension. `reserve` must have been called before."""
        assert self._values is not None, "no weight was packed"
        return self._values


class WidenedLinear(KernelLinear):
    """A linear layer on a GPU with a 4-bit weight (int4 or MXFP4), whose input is not quantised.

    For few rows, a kernel dequantises the weight in registers. For many rows, the weight is dequantised to a buffer in
    memory, the panel, and multiplied by the vendor's library. A deterministic layer never uses the panel.

    Attributes:
        many: The minimum number of rows for the panel.
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
        """Pack the 4-bit weight of a linear layer.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
            activation: The gated activation of the results. None: there is none.
            dtype: The dtype of activations.
            panel: The buffer for dequantised values. None: results must not depend on the batch.
            peaks: The peaks of the GPU, which decide how many rows need the panel.

        Raises:
            ValueError: The kernels do not support the size of the weight's groups.
        """
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
        weight = self._weight
        if isinstance(weight, Int4Weight):
            return int4_weight_matmul(x, weight, self._bias, activation=gate, deterministic=fixed)
        return mxfp4_matmul(x, weight, self._bias, activation=gate, deterministic=fixed)
