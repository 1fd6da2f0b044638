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
    """The factors of an adapter for a product, to which it adds B A x. a: (rank, in), b: (out, rank), scaled."""

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

    def onto(self, results: Tensor) -> Tensor:
        """Add them to the results (T, out) of a product."""
        return (results.float() + self.spread()).to(results.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Room for the factors of `places` adapters at a time on a device; the others wait in the host's memory."""

    places: int
    device: torch.device


class Adapters(ABC):
    """The factors of adapters for one product, packed as the operators like best: of all, or those that stand in
    places."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """x: (T, in), what the product reads."""

    @abstractmethod
    def place(self, number: int, place: int) -> None:
        """Put the factors of the adapter with this number, from 1 on, into a place, from 1 on. What was launched before
        still reads what stood there."""


class Linear(ABC):
    """y = x W^T + b with the weight in whatever layout its implementation likes best."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in_features) → (T, out_features)."""

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """y = x W^T + b + what adapters add. Layers with an activation put it behind."""
        return added.onto(self(x))


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight whose values are quantised: `codes` (out, in), int8 or float8_e4m3fn, and scales (out,) float32, or
    (blocks, groups of inputs) of which `lines` (out,) int32 say which an output has; see
    batchinfer_kernels.block_fp8_matmul. With a `group` codes are int4, in int8, and scales and maybe zeros (out, groups
    of so many inputs) float32; see batchinfer_kernels.int4_linear. Or they are MXFP4, (out, in / 2) uint8, and scales
    exponents, (out, in / 32) uint8; see batchinfer_kernels.mxfp4."""

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
    """A weight (out, in) of which each four inputs, next to one another, have two zeros, as the checkpoint says."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


@dataclass(frozen=True, slots=True, eq=False)
class RoundedWeight:
    """A weight (out, in) in floats that is quantised to a form while it is packed, by operators that can."""

    values: Tensor
    form: WeightForm

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape, (out, in)."""
        return self.values.shape


# What a product multiplies with: values of the run's dtype, those of a sparse weight, or quantised ones
Weight: TypeAlias = Tensor | SparseWeight | CodedWeight | RoundedWeight


def values_of(weight: Weight, name: str) -> Tensor:
    """Return a weight that is not quantised, zeros included, for operators of this name that multiply no others. Raises
    TypeError for one that is."""
    if isinstance(weight, SparseWeight):
        return weight.values
    if isinstance(weight, CodedWeight):
        raise TypeError(f"{name} operators have no products of {weight.codes.dtype}")
    if isinstance(weight, RoundedWeight):
        raise TypeError(f"{name} operators do not round weights to {weight.form.codes} while they pack them")
    return weight


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One matrix product of each expert: weight (experts, out, in), bias (experts, out). With scales, each expert's,
    the weight holds quantised values, as a CodedWeight's; the lines are those of every expert, and group and zeros are
    int4's. Or it is in MXFP4, and scales are exponents: see batchinfer_kernels.mxfp4. In floats with a `form` it is
    quantised to that while it is packed, as a RoundedWeight."""

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
    """The layer that makes logits, float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """(T,) int64: the token with the greatest logit, the lowest of equals; NO_TOKEN where that is not finite or a
        logit is no number."""
        return finite_argmax(self(x))


def finite_argmax(logits: Tensor) -> Tensor:
    """(n, vocab) → (n,) int64: the greatest, the lowest of equals; NO_TOKEN where it is not finite or one is NaN."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def placed(result: Tensor, out: Tensor | None) -> Tensor:
    """The result where it is wanted."""
    return result if out is None else out.copy_(result)


class HeadsLinear(ABC):
    """A matrix product for each head."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, heads, in) → (T, heads, out)."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The products that take queries to the latent of K, and results from the latent of V, head by head: of `rank`
    values, and of the `plain` ones of a query that are not rotated."""

    k: HeadsLinear
    v: HeadsLinear
    rank: int
    plain: int


class Experts(ABC):
    """The experts of a layer, with their weights in whatever layout the implementation likes best. `loads` (experts,)
    int64 counts, in place, the tokens that each was given so far. Where it `skips`, the number behind the last expert
    is that of none: such rows are not computed and add nothing, and the host need not know which they are.
    """

    loads: Tensor
    skips: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """x: (T, hidden) → (T, hidden); see batchinfer_kernels.experts. `counted` (T,) bool: the tokens that count as
        load, all if not given."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer's weights as the operators want them, by the names that its spec gives them."""

    linears: Mapping[str, Linear]
    norms: Mapping[str, Tensor]
    rope: RopeTable | None  # None: it has no attention
    experts: Experts | None = None
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    latent_heads: LatentHeads | None = None
    # (query heads, 2 x positions) float32, of the model: what a key adds to its score by its distance
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
        """x, residual: (T, hidden), to be added, None for nothing, as in the first layer → the next layer's. Writes K
        and V of the step's tokens to `cache`, unless that is an earlier layer's. A layer without attention has neither
        cache nor plan, and the inputs of any group. What is given, and what a layer before it returned, may be
        overwritten."""


class ActivatedLinear(Linear):
    """act(x W^T + b) as two operators, or act(gate) * up of a layer that makes both."""

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
