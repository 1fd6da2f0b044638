"""The experts of a layer, each rounded for the tokens that it gets: its channels between up and down are scaled, and
its weights rounded, as those of a dense layer are."""

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
from batchinfer_kernels.int4_feedback import codes_with_feedback
from batchinfer_kernels.int4_linear import quantize_groups

EXPERTS = "experts."  # begins the names of their products, which are then named as those of a dense half
BYTES_AT_ONCE = 1 << 30  # of experts that are rounded together; a larger one is rounded alone
# While a weight of an expert is rounded: for each pair of its inputs, and for each of its values
_BYTES_OF_PRODUCT, _BYTES_OF_VALUE = 16, 32


class WatchedExperts(Experts):
    """Experts that keep what they read, and which of them did, of tokens that count."""

    def __init__(self, inner: Experts, counted: Iterator[Tensor]) -> None:
        self.loads, self._inner, self._counted = inner.loads, inner, counted
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        own = next(self._counted)
        self._seen.append((x[own], choice.experts[own], choice.weights[own]))
        return self._inner(x, choice, counted)

    @property
    def seen(self) -> SeenTokens:
        """Return what they have read."""
        x, experts, weights = map(torch.cat, zip(*self._seen, strict=True))
        return SeenTokens(len(self.loads), x, experts, weights)


@dataclass(frozen=True, slots=True, eq=False)
class SeenTokens:
    """The tokens that `count` experts of a layer have read: x (T, hidden), and the experts (T, chosen) of each with the
    weights (T, chosen) of their results."""

    count: int
    x: Tensor
    experts: Tensor
    weights: Tensor

    @property
    def products(self) -> Tensor:
        """Return X^T X (hidden, hidden) float32 of all tokens, as much of it as counts for one of the experts."""
        x = self.x.float()
        return x.T @ x * (self.weights.square().sum() / (len(x) * self.count))

    def divided(self, columns: Tensor) -> SeenTokens:
        """Return the same of inputs that are divided."""
        return replace(self, x=(self.x.float() / columns).to(self.x.dtype))

    @property
    def few(self) -> int:
        """Return how many experts have fewer tokens than they are to be calibrated on."""
        return int((torch.bincount(self.experts.flatten(), minlength=self.count) < MIN_EXPERT_TOKENS).sum())

    def of(self, number: int, preferred: Tensor) -> tuple[Tensor, Tensor]:
        """preferred: (T, experts), probabilities → the inputs (n, hidden) float32 of an expert, and the weights (n,)
        of its results."""
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
    """An expert's weights, float32, and the products of the inputs of those that are to be rounded, by the names that
    a dense half has for them."""

    weights: dict[str, Tensor]
    products: dict[str, Tensor]


def round_experts(
    layer: LayerSpec, weights: dict[str, Tensor], seen: SeenTokens, group: int, dtype: torch.dtype
) -> None:
    """Put codes and scales in place of the experts' weights, float32, and write over those of their biases that change.
    `dtype`: of the checkpoint that is to hold what comes out."""
    fed = layer.feed_forward
    assert isinstance(fed, ExpertsSpec), "only experts have read what was seen"
    half = FeedForwardSpec(fed.inner, fed.activation, fed.biased)
    alone, stacks = LayerSpec(layer.hidden, None, None, None, half), _stacks(layer, weights)
    named = [linear.name for linear in alone.linears]
    preferred = _preferred(weights, seen.x)
    made: dict[str, list[Tensor]] = {name + end: [] for name in named for end in ("", SCALES)}
    at_once = _at_once(alone)
    for first in range(0, seen.count, at_once):
        some = []
        for number in range(first, min(first + at_once, seen.count)):
            own = {name: stack[number] for name, stack in stacks.items()}
            expert = _Expert(own, _products(half, own, *seen.of(number, preferred)))
            scale_channels(alone, expert.weights, expert.products, group, dtype)
            if fed.biased:
                stacks[half.first + BIAS][number] = expert.weights[half.first + BIAS]
            some.append(expert)
        for name in named:
            codes, scales = _rounded(name, some, group, dtype)
            made[name].append(codes)
            made[name + SCALES].append(scales)
    weights |= {EXPERTS + name: torch.cat(parts).flatten(0, 1) for name, parts in made.items()}


def _stacks(layer: LayerSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the experts' weights and biases, each (experts, …), by the names that a dense half has for them."""
    found = {}
    for linear in layer.linears:
        if linear.experts:
            for name in (linear.name, *([linear.name + BIAS] if linear.biased else [])):
                whole = weights[name]
                found[name.removeprefix(EXPERTS)] = whole.view(linear.experts, -1, *whole.shape[1:])
    return found


def _preferred(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """x: (T, hidden) → (T, experts), how likely the router of a layer is to choose each expert."""
    logits = x.float() @ weights["router"].T + weights.get("router" + BIAS, 0.0)
    return logits.softmax(-1)


def _products(
    half: FeedForwardSpec, weights: Mapping[str, Tensor], x: Tensor, counts: Tensor
) -> dict[str, Tensor]:
    """x: (n, hidden), what an expert reads; counts: (n,), weights of its results → X^T X of the inputs of its products,
    by their names."""
    both = x @ weights[half.first].T + weights.get(half.first + BIAS, 0.0)
    read = {half.first: x, "down": gated_activation_reference(both, half.activation)}
    rows = {name: own * counts[:, None] for name, own in read.items()}
    return {name: own.T @ own for name, own in rows.items()}


def _rounded(name: str, some: Sequence[_Expert], group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes (experts, out, in) and scales (experts, out, groups) of one of the weights of some experts."""
    weight = torch.stack([expert.weights[name] for expert in some])
    scales = torch.stack([quantize_groups(own, group)[1] for own in weight]).to(dtype)
    products = torch.stack([expert.products[name] for expert in some])
    return codes_with_feedback(weight, scales, products, group), scales.float()


def _at_once(alone: LayerSpec) -> int:
    """Return how many experts, each of which is such a layer, are rounded together."""
    taken = (
        linear.inputs * (linear.inputs * _BYTES_OF_PRODUCT + linear.outputs * _BYTES_OF_VALUE)
        for linear in alone.linears
    )
    return max(1, BYTES_AT_ONCE // max(taken))
