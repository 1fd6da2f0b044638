"""The layers of a decoder and their weights, as operators pack them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache, RopeTable
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.sample import NO_TOKEN as NO_TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The factors of an adapter, which adds B A x to a product.

    Attributes:
        a: A, (rank, inputs).
        b: B, (outputs, rank), already scaled.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AddedValues:
    """The values that adapters add to the results of a product.

    Attributes:
        values: (n, outputs), for the last n tokens of `rows.order`, in that order. All other tokens get 0.
        rows: The tokens of the step sorted by adapter.
    """

    values: Tensor
    rows: AdaptedRows

    def spread(self) -> Tensor:
        """Return the adapters' values of all tokens in order, (tokens, outputs), with 0 for tokens without any."""
        missing = len(self.rows.order) - len(self.values)
        whole = torch.nn.functional.pad(self.values, (0, 0, missing, 0)) if missing else self.values
        return whole[self.rows.places]

    def add_to(self, results: Tensor) -> Tensor:
        """Return the results of a product (tokens, outputs) plus the adapters' values, in the results' dtype."""
        return (results.float() + self.spread()).to(results.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Room for the factors of some adapters at a time on a device; all others stay in the host's memory.

    Attributes:
        places: The number of adapters that fit.
        device: The device.
    """

    places: int
    device: torch.device


class Adapters(ABC):
    """The packed factors of adapters for one product: of all adapters, or of the ones currently on the device."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """Return the values that adapters add to the results of the product.

        Args:
            x: (tokens, inputs), the input of the product.
            rows: The tokens sorted by adapter.
        """

    @abstractmethod
    def place(self, number: int, place: int) -> None:
        """Copy the factors of an adapter to a place. Work that was launched earlier still reads the old factors.

        Args:
            number: The adapter's number, from 1.
            place: The place, from 1.
        """


class Linear(ABC):
    """A layer y = x W^T + b, with the weight in a layout that its implementation chooses.

    Attributes:
        in_features: The number of inputs.
        out_features: The number of outputs.
    """

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the results (tokens, out_features) for x (tokens, in_features)."""

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return x W^T + b plus the adapters' values, with the layer's activation, if any, applied to the sum."""
        return added.add_to(self(x))


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight (outputs, inputs) with quantised values.

    Attributes:
        codes: int8 or float8_e4m3fn values (outputs, inputs), with int4 in int8. In MXFP4, uint8 (outputs, inputs / 2).
        scales: float32: (outputs,), (blocks, groups of inputs) with `lines`, or (outputs, inputs / group) with `group`.
            In MXFP4, exponents (outputs, inputs / 32) uint8.
        lines: (outputs,) int32, the row of scales of each output, or None; see batchinfer_kernels.block_fp8_matmul.
        group: The number of inputs that share a scale in int4, or 0; see batchinfer_kernels.int4_linear.
        zeros: (outputs, inputs / group) float32, the zero points of int4, or None for 0.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None

    @property
    def mxfp4(self) -> bool:
        """Return True if the weight is in MXFP4."""
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (outputs, inputs)."""
        outputs, held = self.codes.shape
        return torch.Size((outputs, 2 * held)) if self.mxfp4 else self.codes.shape


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeight:
    """A weight with 2:4 sparsity: two of four adjacent inputs are zero, according to the checkpoint.

    Attributes:
        values: (outputs, inputs), zeros included.
    """

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (outputs, inputs)."""
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A float weight that operators quantise while they pack it.

    Attributes:
        values: (outputs, inputs).
        form: The form to quantise to.
    """

    values: Tensor
    form: WeightForm

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (outputs, inputs)."""
        return self.values.shape


# The weight of a product: values in the run's dtype, sparse values, or quantised values
Weight: TypeAlias = Tensor | SparseWeight | CodedWeight | RoundedWeight


def values_of(weight: Weight, name: str) -> Tensor:
    """Return the values of a weight that is not quantised, zeros included.

    Args:
        weight: The weight.
        name: The name of the operators, for the message.

    Raises:
        TypeError: If the weight is quantised.
    """
    if isinstance(weight, SparseWeight):
        return weight.values
    if isinstance(weight, CodedWeight):
        raise TypeError(f"{name} operators have no products of {weight.codes.dtype}")
    if isinstance(weight, RoundedWeight):
        raise TypeError(f"{name} operators do not round weights to {weight.form.codes} while they pack them")
    return weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The weights of one matrix product of all experts.

    Attributes:
        weight: (experts, outputs, inputs); quantised values if there are scales, as in a CodedWeight.
        bias: (experts, outputs), or None.
        scales: The scales of each expert's values, as in a CodedWeight, or None for float weights.
        lines: The row of scales of each output, as in a CodedWeight; the same for all experts.
        group: The number of inputs that share a scale in int4, or 0.
        zeros: The zero points of each expert's values in int4, or None for 0.
        form: The form of the weights after packing, if packing quantises them, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None
    form: WeightForm | None = None

    @property
    def mxfp4(self) -> bool:
        """Return True if the weights are in MXFP4."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def int4(self) -> bool:
        """Return True if the weights are in int4."""
        return self.group > 0 and not self.mxfp4


class Head(Linear):
    """The layer that computes logits in float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the id with the largest logit for each row of x (tokens, inputs): (tokens,); see finite_argmax."""
        return finite_argmax(self(x))


def finite_argmax(logits: Tensor) -> Tensor:
    """Return the index of each row's largest logit, (n,) int64, for logits (n, vocab).

    The lowest index wins a tie. If the largest logit is not finite, or any is NaN, the index is NO_TOKEN.
    """
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def write_result(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy the result to `out` and return `out`, or return the result itself if `out` is None."""
    return result if out is None else out.copy_(result)


class HeadsLinear(ABC):
    """A matrix product for each head."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the products (tokens, heads, outputs) for x (tokens, heads, inputs)."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The products per head that map queries to the latent space of K, and results from the latent space of V.

    Attributes:
        k: The product for queries.
        v: The product for results.
        rank: The number of values of a latent.
        plain: The number of leading values of a query that are not rotated.
    """

    k: HeadsLinear
    v: HeadsLinear
    rank: int
    plain: int


class Experts(ABC):
    """The experts of a layer, with weights in a layout that the implementation chooses.

    Attributes:
        loads: The number of tokens that each expert computed so far, (experts,) int64, updated in place.
        skips: If True, the expert number after the last one means no expert: such rows are skipped.
    """

    loads: Tensor
    skips: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, (tokens, hidden); see batchinfer_kernels.experts.

        Args:
            x: (tokens, hidden).
            choice: The experts of each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, or None for all.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer's packed weights, by their names in its spec.

    Attributes:
        linears: The linear layers.
        norms: The weights and biases of norms.
        rope: The table of the rotation, or None without attention.
        experts: The experts, or None.
        vectors: Other vectors, such as sinks.
        latent_heads: The projections of K and V of attention over latents, or None.
        distances: (query heads, 2 * positions) float32, the bias of a key's distance to its query, shared by all
            layers.
        adapters: The adapters of the linear layers that any adapter changes.
    """

    linears: Mapping[str, Linear]
    norms: Mapping[str, Tensor]
    rope: RopeTable | None
    experts: Experts | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    latent_heads: LatentHeads | None = None
    distances: Tensor | None = None
    adapters: Mapping[str, Adapters] = field(default_factory=dict)

    def product(self, name: str, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the result of the linear layer `name` for x (tokens, inputs), including the tokens' adapters."""
        linear, adapters = self.linears[name], self.adapters.get(name)
        if adapters is None or inputs.adapted is None:
            return linear(x)
        return linear.adapted(x, adapters(x, inputs.adapted))


class DecoderLayer(ABC):
    """A layer of a decoder.

    Attributes:
        loads: `Experts.loads` of its experts, or None without experts.
    """

    loads: Tensor | None = None

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache | None,
        plan: AttentionPlan | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return x and residual for the next layer, each (tokens, hidden), and store K and V of the step's tokens.

        The layer may overwrite its arguments and results of earlier layers.

        Args:
            x: The output of the layer before.
            residual: A tensor to add to x, or None, as in the first layer.
            inputs: Positions and slots of the layer's cache group, or of any group for a layer without attention.
            cache: The layer's cache, or None without attention. An earlier layer's cache is only read.
            plan: The plan of attention, or None without attention.
        """


class ActivatedLinear(Linear):
    """A layer act(x W^T + b), or act(gate) * up, computed by two operators."""

    def __init__(
        self,
        inner: Linear,
        out_features: int,
        operator: Callable[[Tensor, Activation], Tensor],
        name: Activation,
    ) -> None:
        """Create a layer from a linear layer and an activation operator.

        Args:
            inner: The linear layer.
            out_features: The number of results of the operator.
            operator: Applies the activation to the results of `inner`.
            name: The name of the activation.
        """
        self.in_features, self.out_features = inner.in_features, out_features
        self._inner, self._operator, self._activation = inner, operator, name

    def __call__(self, x: Tensor) -> Tensor:
        """Return the results (tokens, out_features) for x (tokens, in_features)."""
        return self._operator(self._inner(x), self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Add the adapters' values to the inner product of x (tokens, inputs), and return the activation of the sum."""
        return self._operator(self._inner.adapted(x, added), self._activation)
