"""Experts on a GPU, with Triton's grouped products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from batchinfer.models.ops.layers import Experts, ExpertWeights, HeadsLinear
from batchinfer.models.ops.library_products import LibraryGrouped
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.experts import choose_experts as choose_experts_reference
from batchinfer_kernels.gated_activation import Activation
from batchinfer_kernels.gpu.choose_experts import can_choose, choose_experts
from batchinfer_kernels.gpu.combine import combine
from batchinfer_kernels.gpu.grouped_coded_matmul import grouped_int4_matmul, grouped_mxfp4_matmul
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.gpu.sort_by_expert import ExpertRows, sort_by_expert
from batchinfer_kernels.mxfp4 import pack_mxfp4_weights
from batchinfer_kernels.quantized_matmul import pack_int4_experts
from batchinfer_kernels.routing import Routing


def choose(logits: Tensor, routing: Routing, correction: Tensor | None) -> Choice:
    """Choose the experts of each token on a GPU, by one kernel if it supports the routing.

    Args:
        logits: (tokens, experts) float32, the output of the router.
        routing: The rule by which experts are chosen.
        correction: (experts,), numbers to add to scores for the choice only. None: there are none.
    """
    chosen_by = choose_experts if can_choose(routing) else choose_experts_reference
    return chosen_by(logits, routing, correction)


class CodedExperts(Experts):
    """The experts of a layer with weights in MXFP4 or int4, which kernels dequantise in registers.

    CUDA graphs can capture their kernels.
    """

    skips = True

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation,
        deterministic: bool,
        dtype: torch.dtype,
    ) -> None:
        """Pack the quantised weights of experts.

        Args:
            gate_up: The weights of each expert's first product, gate before up.
            down: The weights of each expert's second product.
            activation: The activation of the gate.
            deterministic: True if results must not depend on the batch.
            dtype: The dtype of activations.
        """
        self._gate_up, self._down = (_make_product(weights, dtype) for weights in (gate_up, down))
        self._biases = (gate_up.bias, down.bias)
        self._activation, self._deterministic = activation, deterministic
        self.loads = torch.zeros(len(gate_up.weight), dtype=torch.int64, device=gate_up.weight.device)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, (tokens, hidden).

        Args:
            x: (tokens, hidden).
            choice: The experts that the router chose for each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, such as all except padding. None: all tokens.
        """
        rows = sort_by_expert(choice, self.loads, counted)
        options = {"ends": rows.ends, "deterministic": self._deterministic}
        into, back = self._biases
        inner = self._gate_up(
            x, rows.starts, into, activation=self._activation, from_rows=rows.tokens, **options
        )
        return combine(self._down(inner, rows.starts, back, **options), rows.places, choice.weights)


def _make_product(weights: ExpertWeights, dtype: torch.dtype) -> Callable[..., Tensor]:
    assert weights.scales is not None, "the weights are quantised"
    if weights.mxfp4:
        packed = pack_mxfp4_weights(weights.weight, weights.scales)
        return lambda x, *more, **options: grouped_mxfp4_matmul(x, packed, *more, **options)
    coded = pack_int4_experts(weights.weight, weights.scales, weights.zeros, weights.group, dtype)
    return lambda x, *more, **options: grouped_int4_matmul(x, coded, *more, **options)


class TritonExperts(Experts):
    """The experts of a layer with float, int8 or float8 weights. CUDA graphs can capture their kernels."""

    skips = True
    library_name = "torch"

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        activation: Activation,
        deterministic: bool,
        library: LibraryGrouped | None = None,
    ) -> None:
        """Create the experts of a layer.

        Args:
            gate_up: The weights of each expert's first product, gate before up.
            down: The weights of each expert's second product.
            activation: The activation of the gate.
            deterministic: True if results must not depend on the batch.
            library: A library's products, which may be faster for many rows. None: batchinfer's kernels compute all.
        """
        self._gate_up, self._down = ((weights.weight, weights.scales) for weights in (gate_up, down))
        self._lines, self._hadamard = (gate_up.lines, down.lines), gate_up.hadamard
        self._biases = (gate_up.bias, down.bias)
        self._activation, self._deterministic = activation, deterministic
        self._library = library
        self.least_library_rows: int | None = None
        weight = gate_up.weight
        self.loads = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, (tokens, hidden).

        Args:
            x: (tokens, hidden).
            choice: The experts that the router chose for each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, such as all except padding. None: all tokens.
        """
        rows, least = sort_by_expert(choice, self.loads, counted), self.least_library_rows
        many = least is not None and len(rows.tokens) >= least
        made = self._by_library(x, rows) if many else self._by_kernels(x, rows)
        return combine(made, rows.places, choice.weights)

    @property
    def form(self) -> str:
        """Return a text with all properties of the experts that their duration depends on; see `LibraryChoice.form`."""
        (experts, outputs, inputs), kind = self._gate_up[0].shape, self._gate_up[0].dtype
        return f"{experts} experts in {str(kind).removeprefix('torch.')}, {outputs} x {inputs}, {self._activation}"

    def trial(self, rows: int, device: torch.device) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Return two functions that compute experts for the same random rows: by batchinfer's kernels and by a library.

        Args:
            rows: The number of rows, which are distributed evenly among the experts.
            device: The device of the weights.
        """
        experts, _, inputs = self._gate_up[0].shape
        x = torch.randn(rows, inputs, dtype=self._gate_up[0].dtype, device=device)
        given = torch.arange(rows, device=device)[:, None] % experts
        choice = Choice(given, torch.ones(rows, 1, device=device))
        ordered = sort_by_expert(choice, torch.zeros_like(self.loads))
        return lambda: self._by_kernels(x, ordered), lambda: self._by_library(x, ordered)

    def _by_library(self, x: Tensor, rows: ExpertRows) -> Tensor:
        assert self._library is not None, "no library was chosen"
        return self._library(x, rows)

    def _by_kernels(self, x: Tensor, rows: ExpertRows) -> Tensor:
        (gate_up, scales), (down, down_scales) = self._gate_up, self._down
        inner = grouped_matmul(
            x,
            gate_up,
            rows.starts,
            self._biases[0],
            scales=scales,
            lines=self._lines[0],
            activation=self._activation,
            from_rows=rows.tokens,
            ends=rows.ends,
            deterministic=self._deterministic,
            hadamard=self._hadamard,
        )
        return grouped_matmul(
            inner,
            down,
            rows.starts,
            self._biases[1],
            scales=down_scales,
            lines=self._lines[1],
            ends=rows.ends,
            deterministic=self._deterministic,
            hadamard=self._hadamard,
        )


class TritonHeads(HeadsLinear):
    """A linear layer with a matrix of its own for each attention head. Heads are computed as experts are."""

    def __init__(self, weights: ExpertWeights, deterministic: bool) -> None:
        self._weight, self._scales = weights.weight.contiguous(), weights.scales
        self._deterministic, self._hadamard = deterministic, weights.hadamard

    @property
    def values(self) -> Tensor | None:
        """Return the float weights, (heads, outputs, inputs); None if the weights are quantised."""
        return self._weight if self._scales is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply each head of x by the head's matrix, and return (tokens, heads, outputs).

        Args:
            x: (tokens, heads, inputs).
        """
        (tokens, heads, _), weight = x.shape, self._weight
        starts = torch.arange(heads + 1, device=x.device) * tokens
        rows = x.transpose(0, 1).reshape(heads * tokens, -1)
        made = grouped_matmul(
            rows,
            weight,
            starts,
            scales=self._scales,
            deterministic=self._deterministic,
            hadamard=self._hadamard,
        )
        return made.view(heads, tokens, -1).transpose(0, 1)
