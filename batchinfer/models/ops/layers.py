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
    """The LoRA matrices A and B of an adapter for one matrix product. The adapter adds B A x to its result.

    Attributes:
        a: A, (rank, inputs).
        b: B, (outputs, rank), multiplied by the adapter's scale.
    """

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AddedValues:
    """The values that LoRA adapters add to the results of a matrix product.

    Attributes:
        values: (n, outputs), a row for each token with an adapter. The tokens are the last n of `rows.order`.
        rows: The tokens of the step sorted by adapter.
    """

    values: Tensor
    rows: AdaptedRows

    def spread(self) -> Tensor:
        """Return the adapters' values in the order of the step's tokens, (tokens, outputs).

        Tokens without an adapter have 0.
        """
        missing = len(self.rows.order) - len(self.values)
        whole = torch.nn.functional.pad(self.values, (0, 0, missing, 0)) if missing else self.values
        return whole[self.rows.places]

    def add_to(self, results: Tensor) -> Tensor:
        """Return the results of a product plus the adapters' values, in the dtype of the results.

        Args:
            results: (tokens, outputs).
        """
        return (results.float() + self.spread()).to(results.dtype)


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The room for LoRA adapters on a device that cannot hold all adapters of the job at a time.

    Attributes:
        places: The number of adapters that fit at a time. The others stay in the host's memory.
        device: The device.
    """

    places: int
    device: torch.device


class Adapters(ABC):
    """The packed A and B of the LoRA adapters that are on the device, for one matrix product."""

    @abstractmethod
    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """Return B A x of each token's adapter, which is added to the result of the matrix product.

        Args:
            x: (tokens, inputs), the input of the product.
            rows: The tokens sorted by adapter.
        """

    @abstractmethod
    def place(self, number: int, place: int) -> None:
        """Copy A and B of an adapter to the device, over the adapter that has the same place.

        Work that was launched earlier still reads the replaced adapter.

        Args:
            number: The adapter's number, from 1.
            place: The number of the place, from 1.
        """


class Linear(ABC):
    """A linear layer y = x W^T + b, whose weight has the layout that an implementation of operators needs.

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
        """Return the layer's results (tokens, outputs) with LoRA: x W^T + b + `added`, then the activation, if any.

        Args:
            x: (tokens, inputs).
            added: The values of the adapters.
        """
        return added.add_to(self(x))


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight (outputs, inputs) with quantised values.

    Attributes:
        codes: The quantised values, int8 or float8_e4m3fn (outputs, inputs); int4 values are int8. In MXFP4, uint8
            (outputs, inputs / 2), two values per byte.
        scales: float32 (outputs,). With `lines`, (blocks of outputs, groups of inputs). With `group`, (outputs, inputs
            / group). In MXFP4, exponents of scales, uint8 (outputs, inputs / 32).
        lines: (outputs,) int32, the row of `scales` for each output; see batchinfer_kernels.block_fp8_matmul. None:
            scales are not per block.
        group: The number of inputs that share a scale in int4; see batchinfer_kernels.int4_linear. 0: scales are not
            per group.
        zeros: (outputs, inputs / group) float32, the zero points of int4. None: they are 0.
        hadamard: True if the weight was transformed before it was quantised to int8; see
            batchinfer_kernels.quantized_linear.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None
    hadamard: bool = False

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
    """A weight that is 2:4 sparse according to the checkpoint: two of four adjacent inputs are zero.

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
    """Return the values of a float or sparse weight, (outputs, inputs), zeros included.

    Args:
        weight: The weight.
        name: The name of the operators that need floats, for the error message.

    Raises:
        TypeError: The weight is quantised.
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
        weight: (experts, outputs, inputs), or quantised values as in `CodedWeight`, if there are scales.
        bias: (experts, outputs). None: there is none.
        scales: The scales of each expert's weight, as in `CodedWeight`. None: weights are floats.
        lines: The row of scales for each output, as in `CodedWeight`, which all experts share. None: scales are not per
            block.
        group: The number of inputs that share a scale in int4. 0: scales are not per group.
        zeros: The zero points of each expert's weight in int4. None: they are 0.
        form: The form in which packing stores float weights, by quantising them. None: they are not quantised.
        hadamard: True if the weights were transformed, as in `CodedWeight`.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    lines: Tensor | None = None
    group: int = 0
    zeros: Tensor | None = None
    form: WeightForm | None = None
    hadamard: bool = False

    @property
    def mxfp4(self) -> bool:
        """Return True if the weights are in MXFP4."""
        return self.scales is not None and self.scales.dtype == torch.uint8

    @property
    def int4(self) -> bool:
        """Return True if the weights are in int4."""
        return self.group > 0 and not self.mxfp4


class Head(Linear):
    """The output layer of a model (lm_head), which computes logits in float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """Return the id with the largest logit in each row, (tokens,); NO_TOKEN for rows that are not finite.

        Args:
            x: (tokens, inputs), normed hidden states.
        """
        return finite_argmax(self(x))


def finite_argmax(logits: Tensor) -> Tensor:
    """Return the id of the token with the largest logit in each row, (n,) int64.

    The lowest id wins a tie. If the largest logit of a row is not finite, or any is NaN, the result is NO_TOKEN.

    Args:
        logits: (n, vocab).
    """
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def write_result(result: Tensor, out: Tensor | None) -> Tensor:
    """Copy a result to `out`, if it is given, and return the tensor that has the result.

    Args:
        result: The result.
        out: A tensor of the same shape. None: the result itself is returned.
    """
    return result if out is None else out.copy_(result)


class HeadsLinear(ABC):
    """A linear layer with a matrix of its own for each attention head."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Multiply each head of x by the head's matrix, and return (tokens, heads, outputs).

        Args:
            x: (tokens, heads, inputs).
        """


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The weights that compute K and V from latents, per head.

    They are applied to queries and to results of attention, so that K and V need not be computed.

    Attributes:
        k: Maps a query into the space of latents, so that it can be compared with a latent instead of K.
        v: Maps a weighted sum of latents to the weighted sum of V.
        rank: The number of values of a latent.
        plain: The number of leading values of a query that are not rotated.
    """

    k: HeadsLinear
    v: HeadsLinear
    rank: int
    plain: int


class Experts(ABC):
    """The experts of a layer, whose weights have the layout that an implementation of operators needs.

    Attributes:
        loads: (experts,) int64, the number of tokens that each expert has computed so far. Calls update it in place.
        skips: If True, the router's choice may contain the number of experts as an index, which selects no expert.
    """

    loads: Tensor
    skips: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, (tokens, hidden).

        Args:
            x: (tokens, hidden).
            choice: The experts that the router chose for each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, such as all except padding. None: all tokens.
        """


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A decoder layer's packed weights, by their names in its spec.

    Attributes:
        linears: The linear layers, such as "qkv".
        norms: The weights and biases of norms.
        rope: Cosines and sines of the rotary embedding. None: the layer has no attention.
        experts: The experts. None: the layer has none.
        vectors: Other vectors, such as attention sinks.
        latent_heads: The weights that compute K and V from latents. None: the layer has no latent attention.
        distances: (query heads, 2 * positions) float32, the bias of attention scores by the distance of key and query,
            which all layers share. None: there is none.
        adapters: The LoRA adapters of each linear layer that any adapter changes.
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
        """Return the result of a linear layer, including the LoRA adapters of the tokens.

        Args:
            name: The name of the linear layer.
            x: (tokens, inputs).
            inputs: The inputs of the step, which have the adapter of each token.
        """
        linear, adapters = self.linears[name], self.adapters.get(name)
        if adapters is None or inputs.adapted is None:
            return linear(x)
        return linear.adapted(x, adapters(x, inputs.adapted))


class DecoderLayer(ABC):
    """A layer of a decoder.

    Attributes:
        loads: `Experts.loads` of the layer's experts. None: it has none.
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
        """Compute the layer for a step's tokens, cache their K and V, and return the next layer's x and residual.

        The input of a layer is x + residual. The results have the same form, (tokens, hidden) each. The layer may
        overwrite its arguments and the results of earlier layers.

        Args:
            x: (tokens, hidden).
            residual: (tokens, hidden), which is added to x. None: x is the whole input, as in the first layer.
            inputs: Positions and cache slots of the tokens, for the layer's cache group. Any group for a layer without
                attention.
            cache: The KV cache of the layer, or of the earlier layer whose K and V it reads. None: the layer has no
                attention.
            plan: What `Ops.plan_attention` returned for the cache group. None: the layer has no attention.
        """


class ActivatedLinear(Linear):
    """A layer act(x W^T + b) or act(gate) * up, computed by two operators: a linear layer and an activation."""

    def __init__(
        self,
        inner: Linear,
        out_features: int,
        operator: Callable[[Tensor, Activation], Tensor],
        name: Activation,
    ) -> None:
        """Combine a linear layer and an activation operator.

        Args:
            inner: The linear layer.
            out_features: The number of results per token, after the activation.
            operator: Applies the activation to the results of `inner`.
            name: The name of the activation.
        """
        self.in_features, self.out_features = inner.in_features, out_features
        self._inner, self._operator, self._activation = inner, operator, name

    def __call__(self, x: Tensor) -> Tensor:
        """Return the activation of the linear layer's results for x, (tokens, in_features): (tokens, out_features)."""
        return self._operator(self._inner(x), self._activation)

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return the layer's results with LoRA, (tokens, outputs): the activation of x W^T + b + `added`.

        Args:
            x: (tokens, inputs).
            added: The values of the adapters.
        """
        return self._operator(self._inner.adapted(x, added), self._activation)
