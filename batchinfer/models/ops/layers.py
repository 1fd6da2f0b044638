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
    """The factors of an adapter, which adds B A x to a product: a (rank, in), and b (out, rank), already scaled."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AddedValues:
    """The values that adapters add to the results of a product: (n, out), for the last n tokens of `rows.order`, in
    that order; nothing for the others."""

    values: Tensor
    rows: AdaptedRows

    def spread(self) -> Tensor:
        """Return them in the order of the tokens, (T, out), 0 for tokens that get nothing."""
        missing = len(self.rows.order) - len(self.values)
        whole = torch.nn.functional.pad(self.values, (0, 0, missing, 0)) if missing else self.values
        return whole[self.rows.places]

    def add_to(self, results: Tensor) -> Tensor:
        """Add them to the results (T, out) of a product."""
        return (results.float() + self.spread()).to(results.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Room for the factors of `places` adapters at a time on a device; the others wait in the host's memory."""

    places: int
    device: torch.device


class Adapters(ABC):
    """The packed factors of adapters for one product: of all adapters, or of those on the device at the moment."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """Return the values that adapters add, for the input x (T, in) of the product."""

    @abstractmethod
    def place(self, number: int, place: int) -> None:
        """Copy the factors of an adapter to a place. Work that was launched earlier still reads the old factors.

        Args:
            number: The adapter's number, from 1.
            place: The place, from 1.
        """


class Linear(ABC):
    """A layer y = x W^T + b, with the weight in a layout that its implementation chooses."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the results (T, out_features) for x (T, in_features)."""

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return x W^T + b plus the adapters' values, with the layer's activation, if any, applied to the sum."""
        return added.add_to(self(x))


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight (out, in) with quantised values, in one of these layouts:

    - int8 or float8_e4m3fn codes (out, in) with scales (out,) float32
    - The same codes with scales (blocks, groups of inputs); `lines` (out,) int32 is the row of scales of each output.
      See batchinfer_kernels.block_fp8_matmul.
    - int4 codes in int8 with scales and optional zeros (out, in / group) float32. See batchinfer_kernels.int4_linear.
    - MXFP4: codes (out, in / 2) uint8 with exponents (out, in / 32) uint8 as scales. See batchinfer_kernels.mxfp4.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None

    @property
    def mxfp4(self) -> bool:
        """Whether the weight is in MXFP4."""
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        outputs, held = self.codes.shape
        return torch.Size((outputs, 2 * held)) if self.mxfp4 else self.codes.shape


@dataclass(frozen=True, slots=True, eq=False)
class SparseWeight:
    """A weight (out, in) with 2:4 sparsity: two of four adjacent inputs are zero, according to the checkpoint."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A float weight (out, in) that operators quantise to a form while they pack it."""

    values: Tensor
    form: WeightForm

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


# The weight of a product: values in the run's dtype, sparse values, or quantised values
Weight: TypeAlias = Tensor | SparseWeight | CodedWeight | RoundedWeight


def values_of(weight: Weight, name: str) -> Tensor:
    """Return the values of a weight that is not quantised, zeros included.

    Raises:
        TypeError: If the weight is quantised, which the operators named `name` do not support.
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
    """The weights of one matrix product of all experts: weight (experts, out, in) and bias (experts, out).

    With scales per expert, values are quantised as in a CodedWeight; all experts share `lines`. With a `form`, float
    values are quantised to it while they are packed, as in a RoundedWeight.
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
        """Whether the weight is in MXFP4."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def int4(self) -> bool:
        """Whether the weight is in int4."""
        return self.group > 0 and not self.mxfp4


class Head(Linear):
    """The layer that computes logits in float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the token with the largest logit of each row, (T,) int64; see finite_argmax."""
        return finite_argmax(self(x))


def finite_argmax(logits: Tensor) -> Tensor:
    """Return the index of each row's largest logit, (n,) int64, for logits (n, vocab).

    The lowest index wins a tie. If the largest logit is not finite, or any is NaN, the index is NO_TOKEN.
    """
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def write_result(result: Tensor, out: Tensor | None) -> Tensor:
    """Return `out` with a copy of the result, or the result itself without `out`."""
    return result if out is None else out.copy_(result)


class HeadsLinear(ABC):
    """A matrix product for each head."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the products (T, heads, out) for x (T, heads, in)."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The products per head that map queries to the latent space of K, and results from the latent space of V.

    A latent has `rank` values. The first `plain` values of a query are not rotated.
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
        """Return the results (T, hidden) for x (T, hidden); see batchinfer_kernels.experts.

        Args:
            x: The hidden states.
            choice: The experts of each token, and their weights.
            counted: The tokens to count in `loads`, (T,) bool, or None for all.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer's packed weights, by their names in its spec."""

    linears: Mapping[str, Linear]
    norms: Mapping[str, Tensor]
    rope: RopeTable | None  # None: it has no attention
    experts: Experts | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    latent_heads: LatentHeads | None = None
    # The bias that a key's distance adds to its score, (query heads, 2 x positions) float32; shared by all layers
    distances: Tensor | None = None
    # Of those linears that any adapter changes
    adapters: Mapping[str, Adapters] = field(default_factory=dict)

    def product(self, name: str, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Compute the linear of that name, with the adapters of the step's tokens."""
        linear, adapters = self.linears[name], self.adapters.get(name)
        if adapters is None or inputs.adapted is None:
            return linear(x)
        return linear.adapted(x, adapters(x, inputs.adapted))


class DecoderLayer(ABC):
    """A layer of a decoder."""

    loads: Tensor | None = None  # where it has experts: `Experts.loads`

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache | None,
        plan: AttentionPlan | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return x and residual for the next layer, each (T, hidden), and store K and V of the step's tokens.

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
        self.in_features, self.out_features = inner.in_features, out_features
        self._inner, self._operator, self._activation = inner, operator, name

    def __call__(self, x: Tensor) -> Tensor:
        return self._operator(self._inner(x), self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._operator(self._inner.adapted(x, added), self._activation)
