"""Calibrates the experts of a layer, each for the tokens that it computes.

As in a dense half, the channels between up and down are scaled, and the weights rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.models.calibration.channels import scale_channels
from batchinfer.models.calibration.work import MIN_EXPERT_TOKENS
from batchinfer.models.ops.layers import Experts
from batchinfer.models.spec.parameters import BIAS, SCALES
from batchinfer.models.spec.spec import ExpertsSpec, FeedForwardSpec, LayerSpec
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.int4_feedback import round_with_feedback
from batchinfer_kernels.int4_linear import quantize_groups

EXPERTS = "experts."  # prefix of the products of experts; the rest is the name in a dense half
BYTES_AT_ONCE = 1 << 30  # memory for experts that are rounded together; at least one is
# Bytes needed to round a weight of an expert: per pair of inputs, and per value
_BYTES_OF_PRODUCT, _BYTES_OF_VALUE = 16, 32


class WatchedExperts(Experts):
    """Wraps the experts of a layer, and records their inputs and the router's choices.

    Only tokens that calibration counts are recorded: a prefix that several rows share counts once.
    """

    def __init__(self, inner: Experts, counted: Iterator[Tensor]) -> None:
        self.loads, self._inner, self._counted = inner.loads, inner, counted
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the experts' outputs, (T, hidden), and record x and the router's choice."""
        own = next(self._counted)
        self._seen.append((x[own], choice.experts[own], choice.weights[own]))
        return self._inner(x, choice, counted)

    @property
    def seen(self) -> SeenTokens:
        """Return the inputs and choices that were recorded so far, concatenated over all calls."""
        x, experts, weights = map(torch.cat, zip(*self._seen, strict=True))
        return SeenTokens(len(self.loads), x, experts, weights)


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens that a layer's experts computed in a calibration, with the router's choices.

    Args:
        count: The number of experts of the layer.
        x: (T, hidden), the inputs of the experts.
        experts: (T, chosen), the indices of the experts that the router chose for each token.
        weights: (T, chosen), the weights by which the outputs of these experts are added up.
    """

    count: int
    x: Tensor
    experts: Tensor
    weights: Tensor

    @property
    def products(self) -> Tensor:
        """Return X^T X of the experts' inputs X, scaled to the mean effect on one expert: (hidden, hidden) float32.

        The scaling factor is the mean squared weight that a token gives to an expert, which is 0 if it is not chosen.
        """
        x = self.x.float()
        return x.T @ x * (self.weights.square().sum() / (len(x) * self.count))

    def divide(self, columns: Tensor) -> SeenTokens:
        """Return a copy with the experts' inputs divided by `columns`, a factor per channel, (hidden,)."""
        return replace(self, x=(self.x.float() / columns).to(self.x.dtype))

    @property
    def few(self) -> int:
        """Return how many experts were chosen for fewer than MIN_EXPERT_TOKENS tokens, too few to calibrate them."""
        return int((torch.bincount(self.experts.flatten(), minlength=self.count) < MIN_EXPERT_TOKENS).sum())

    def of(self, number: int, preferred: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs for calibrating one expert, (n, hidden) float32, and the weights of its outputs, (n,).

        These are the tokens for which the router chose the expert. If there are fewer than MIN_EXPERT_TOKENS, the
        tokens with the next highest probability of the expert are added, and their weights are these probabilities.

        Args:
            number: The index of the expert.
            preferred: (T, experts), the router's probabilities.
        """
        weights = self.weights.masked_fill(self.experts != number, 0.0).sum(1)
        chosen = self.experts.eq(number).any(1)
        missing = min(MIN_EXPERT_TOKENS, len(chosen)) - int(chosen.sum())
        if missing > 0:
            others = preferred[:, number].masked_fill(chosen, -torch.inf).topk(missing).indices
            weights[others] = preferred[others, number]
            chosen[others] = True
        return self.x[chosen].float(), weights[chosen]


@dataclass(frozen=True, slots=True, eq=False)
class _Expert:
    weights: dict[str, Tensor]
    products: dict[str, Tensor]


def round_experts(
    layer: LayerSpec, weights: dict[str, Tensor], seen: SeenTokens, group: int, dtype: torch.dtype
) -> None:
    """Calibrate and quantise the weights of each expert of a layer, on the inputs that the router assigns to it.

    Args:
        layer: The layer.
        weights: All weights of the layer, float32. Those of experts are replaced by quantised values, and scales are
            added. Biases of experts change in place.
        seen: The inputs of the experts, and the router's choices.
        group: Number of consecutive inputs that share a scale.
        dtype: The dtype of the checkpoint to write.
    """
    fed = layer.feed_forward
    assert isinstance(fed, ExpertsSpec), "only layers with experts have seen tokens"
    half = FeedForwardSpec(fed.inner, fed.activation, fed.biased)
    single, stacks = LayerSpec(layer.hidden, None, None, None, half), _stacks(layer, weights)
    named = [linear.name for linear in single.linears]
    preferred = _router_probabilities(weights, seen.x)
    made: dict[str, list[Tensor]] = {name + end: [] for name in named for end in ("", SCALES)}
    at_once = _at_once(single)
    for first in range(0, seen.count, at_once):
        some = []
        for number in range(first, min(first + at_once, seen.count)):
            own = {name: stack[number] for name, stack in stacks.items()}
            expert = _Expert(own, _products(half, own, *seen.of(number, preferred)))
            scale_channels(single, expert.weights, expert.products, group, dtype)
            if fed.biased:
                stacks[half.first + BIAS][number] = expert.weights[half.first + BIAS]
            some.append(expert)
        for name in named:
            codes, scales = _round(name, some, group, dtype)
            made[name].append(codes)
            made[name + SCALES].append(scales)
    weights |= {EXPERTS + name: torch.cat(parts).flatten(0, 1) for name, parts in made.items()}


def _stacks(layer: LayerSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for linear in layer.linears:
        if linear.experts:
            for name in (linear.name, *([linear.name + BIAS] if linear.biased else [])):
                whole = weights[name]
                found[name.removeprefix(EXPERTS)] = whole.view(linear.experts, -1, *whole.shape[1:])
    return found


def _router_probabilities(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    logits = x.float() @ weights["router"].T + weights.get("router" + BIAS, 0.0)
    return logits.softmax(-1)


def _products(
    half: FeedForwardSpec, weights: Mapping[str, Tensor], x: Tensor, counts: Tensor
) -> dict[str, Tensor]:
    """Return X^T X of the inputs X of an expert's matrix products, (in, in) float32, by name of the product.

    Args:
        half: The expert as a dense feed-forward network.
        weights: The expert's weights and biases.
        x: (n, hidden), the inputs of the expert.
        counts: (n,), the router's weights of the expert. Rows of X are multiplied by them.
    """
    both = x @ weights[half.first].T + weights.get(half.first + BIAS, 0.0)
    read = {half.first: x, "down": gated_activation_reference(both, half.activation)}
    rows = {name: own * counts[:, None] for name, own in read.items()}
    return {name: own.T @ own for name, own in rows.items()}


def _round(name: str, some: Sequence[_Expert], group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.stack([expert.weights[name] for expert in some])
    scales = torch.stack([quantize_groups(own, group)[1] for own in weight]).to(dtype)
    products = torch.stack([expert.products[name] for expert in some])
    return round_with_feedback(weight, scales, products, group), scales.float()


def _at_once(expert: LayerSpec) -> int:
    """Return how many experts to round at a time, so that they fit into BYTES_AT_ONCE of memory; at least 1.

    Args:
        expert: A layer with a single expert as its feed-forward network.
    """
    sizes = (
        linear.inputs * (linear.inputs * _BYTES_OF_PRODUCT + linear.outputs * _BYTES_OF_VALUE)
        for linear in expert.linears
    )
    return max(1, BYTES_AT_ONCE // max(sizes))
