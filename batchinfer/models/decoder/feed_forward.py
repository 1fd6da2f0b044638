"""The feed-forward half of a decoder layer, and counters of the tokens per expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from batchinfer.core.samples import ExpertTokens
from batchinfer.models.checkpoint.weights import LayerWeights
from batchinfer.models.ops.attention import AttentionInputs
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import Experts, ExpertWeights, LayerParts
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.parallel.sharded_ops import HeldExperts, SummedExperts
from batchinfer.models.spec.parameters import BIAS, LINES, SCALES, ZEROS
from batchinfer.models.spec.spec import SHARED, ExpertsSpec, FeedForwardSpec, LayerSpec, LinearSpec
from batchinfer_kernels.experts import sigmoid


def feed_forward(ops: Ops, spec: LayerSpec, parts: LayerParts, x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Return the result of a layer's feed-forward half, without its norms, for a step's T tokens: (T, hidden).

    Args:
        ops: The operators.
        spec: The layer.
        parts: The packed layer.
        x: (T, hidden), the normed input.
        inputs: Adapters and cache slots of the step's tokens.
    """
    if isinstance(spec.feed_forward, ExpertsSpec):
        return _expert_half(ops, spec.feed_forward, parts, x, inputs)
    return _dense_half(spec.feed_forward, parts, x, inputs)


def _dense_half(
    spec: FeedForwardSpec, parts: LayerParts, x: Tensor, inputs: AttentionInputs, start: str = ""
) -> Tensor:
    return parts.product(start + "down", parts.product(start + spec.first, x, inputs), inputs)


def _expert_half(
    ops: Ops, spec: ExpertsSpec, parts: LayerParts, x: Tensor, inputs: AttentionInputs
) -> Tensor:
    assert parts.experts is not None
    logits = parts.linears["router"](x)
    choice = ops.choose_experts(logits, spec.routing, parts.vectors.get("correction"))
    padding = inputs.padding_slot
    counted = None if padding is None else inputs.slots != padding
    routed = parts.experts(x, choice, counted)
    if spec.shared is None:
        return routed
    shared = _dense_half(spec.shared, parts, x, inputs, SHARED)
    if spec.shared_gated:
        shared = shared * sigmoid(parts.linears["shared_gate"](x)).to(shared.dtype)
    return routed + shared


def pack_experts(
    ops: Ops, spec: LayerSpec, weights: LayerWeights, ranks: Ranks = SINGLE_RANK
) -> Experts | None:
    """Pack the experts of a layer into the form that its operators read. Returns None if the layer has no experts.

    Args:
        ops: The operators.
        spec: The layer, or a rank's part of it.
        weights: The weights of the layer.
        ranks: The ranks among which the experts are divided. The returned experts sum their outputs over all ranks.
    """
    fed = spec.feed_forward
    if not isinstance(fed, ExpertsSpec):
        return None
    linears = {linear.name: linear for linear in spec.linears}
    into, back = (_of_experts(ops, weights, linears[f"experts.{name}"]) for name in ("gate_up", "down"))
    experts = ops.pack_experts(into, back, fed.activation)
    if fed.held is not None:
        return HeldExperts(experts, ops, fed, ranks.experts, ranks.exact)
    return experts if ranks.tensor.size == 1 else SummedExperts(experts, ranks.tensor)


def _of_experts(ops: Ops, weights: LayerWeights, linear: LinearSpec) -> ExpertWeights:
    def split(end: str) -> Tensor | None:
        found = weights.get(linear.name + end)
        return None if found is None else found.view(linear.experts, -1, *found.shape[1:])

    weight, scales, lines = split(""), split(SCALES), weights.get(linear.name + LINES)
    assert weight is not None, "a layer has all of its weights"
    if scales is None and linear.form is not None and linear.form.coded:
        return ops.quantize_experts(ExpertWeights(weight, split(BIAS)), linear.form)
    return ExpertWeights(
        weight,
        split(BIAS),
        scales,
        None if lines is None else lines[: len(lines) // linear.experts],  # all experts have equal lines
        0 if linear.form is None else linear.form.group,
        split(ZEROS),
    )


class ExpertLoads:
    """Counters on the device of the tokens that each expert of each layer has computed. Kernels increase them."""

    def __init__(self, layers: Mapping[int, Tensor]) -> None:
        """Wrap counters on the device.

        Args:
            layers: A counter per expert, (experts,) int64, by number of the layer.
        """
        self._layers = layers

    def numbered_from(self, first: int) -> ExpertLoads:
        """Return the same counters with the layer numbers of the whole model instead of a pipeline stage.

        Args:
            first: The number in the whole model of the stage's first layer.
        """
        return ExpertLoads({first + index: loads for index, loads in self._layers.items()})

    def read(self) -> ExpertTokens:
        """Wait for the device, and return each expert's number of tokens since `restart`, by number of the layer."""
        return {index: loads.tolist() for index, loads in self._layers.items()}

    def restart(self) -> None:
        """Set the counters of tokens per expert to 0."""
        for loads in self._layers.values():
            loads.zero_()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager in which tokens do not count: at its end, the counters get their earlier values."""
        kept = {index: loads.clone() for index, loads in self._layers.items()}
        try:
            yield
        finally:
            for index, loads in self._layers.items():
                loads.copy_(kept[index])
