"""Takes outlier channels out of what int8 has to round: from norms into the weights that read them, and from up
projections into down projections (Xiao et al., 2023, "SmoothQuant", with half of the ratio moved, and with the sizes of
weights in place of measured activations). Factors are powers of two, so that a model of floats keeps its bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.parallel.group import Group, SingleRankGroup
from batchinfer.models.spec.divisible import gated_halves, norm_readers
from batchinfer.models.spec.parameters import BIAS, FACTOR_A, FACTOR_B, FINAL_NORM
from batchinfer.models.spec.spec import (
    ExpertsSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
)

# Of the median channel's size: smaller channels stay as they are, and with them most checkpoints
OUTLIER_RATIO = 4.0


class SmoothedWeights(Weights):
    """Hands on a model's weights with smaller outliers, where products are computed in int8 that the checkpoint does
    not store. `ranks` have the experts that are not here: what all experts read becomes smaller by what is in all of
    them."""

    def __init__(self, weights: Weights, spec: ModelSpec, ranks: Group | None = None) -> None:
        self._weights, self._spec, self._ranks = weights, spec, ranks or SingleRankGroup()

    def tables(self) -> Tables:
        tables, norm = self._weights.tables(), self._spec.final_norm
        if norm is None or not self._spec.has_head or not _is_rounded(self._spec.head):
            return tables
        sizes = _sizes(tables.norms[FINAL_NORM], norm)
        factors = factors_of(sizes, _columns([tables.head])) if has_outliers(sizes) else None
        if factors is None:
            return tables
        norms = {**tables.norms, **_divided(tables.norms, FINAL_NORM, norm, factors)}
        return replace(tables, head=_times(tables.head, factors), norms=norms)

    def layer(self, index: int) -> LayerWeights:
        layer, weights = self._spec.layers[index], dict(self._weights.layer(index))
        linears = {linear.name: linear for linear in layer.linears}
        for name, readers in norm_readers(layer):
            fed = layer.feed_forward
            ranged = isinstance(fed, ExpertsSpec) and fed.held is not None and "experts.gate_up" in readers
            among = self._ranks if ranged else SingleRankGroup()
            _smooth_norm(weights, name, layer.norms[name], [linears[reader] for reader in readers], among)
        for up, down in gated_halves(layer):
            _smooth_half(weights, linears[up], linears[down])
        return weights


def _is_rounded(linear: LinearSpec) -> bool:
    """Whether its weight becomes int8 or int4 when it is loaded, and its inputs int8 when they come."""
    form = linear.form
    return form is not None and form.codes in ("int4", "int8") and not form.stored


def _smooth_norm(
    weights: dict[str, Tensor], name: str, norm: NormSpec, readers: list[LinearSpec], ranks: Group
) -> None:
    """Divide a norm's weight, and multiply the columns of all that read it, also at other ranks."""
    if not any(map(_is_rounded, readers)) or any(reader.stored for reader in readers):
        return
    sizes = _sizes(weights[name], norm)
    if not has_outliers(sizes):  # as at all ranks, which have this norm
        return
    columns = ranks.all_gather(_columns(weights[reader.name] for reader in readers)).amax(0)
    factors = factors_of(sizes, columns)
    if factors is not None:
        weights |= _divided(weights, name, norm, factors)
        weights |= {reader.name: _times(weights[reader.name], factors) for reader in readers}
        for reader in readers:
            scale_factors(weights, reader.name + FACTOR_A, factors)


def _smooth_half(weights: dict[str, Tensor], first: LinearSpec, second: LinearSpec) -> None:
    """Divide the outputs of up projections, and multiply the inputs of down projections, expert by expert."""
    if not _is_rounded(second) or first.stored:
        return
    count = max(1, first.experts)
    into, back = weights[first.name], weights[second.name]
    ups, downs = into.view(count, 2, -1, into.shape[1])[:, 1], back.view(count, -1, back.shape[1])
    sizes = ups.float().norm(dim=-1)
    each = [
        factors_of(size, _columns([down])) if has_outliers(size) else None
        for size, down in zip(sizes, downs, strict=True)
    ]
    if all(factors is None for factors in each):
        return
    ones = torch.ones(back.shape[1], device=back.device)
    factors = torch.stack([ones if found is None else found for found in each])
    gates = torch.ones_like(factors)
    divisors = torch.stack((gates, factors), 1).reshape(-1)
    weights[first.name] = _times(into, 1 / divisors[:, None])
    if first.biased:
        bias = weights[first.name + BIAS]
        weights[first.name + BIAS] = _times(bias, 1 / divisors)
    weights[second.name] = _times(downs, factors[:, None]).view(back.shape)
    if count == 1:  # experts have no adapters
        scale_factors(weights, first.name + FACTOR_B, 1 / divisors[:, None])
        scale_factors(weights, second.name + FACTOR_A, factors[0])


def scale_factors(weights: dict[str, Tensor], start: str, factors: Tensor) -> None:
    """Change the factors of all adapters whose names begin so as the weight beside which they stand."""
    for name in [name for name in weights if name.startswith(start)]:
        weights[name] = _times(weights[name], factors)


def has_outliers(loud: Tensor) -> bool:
    """Whether one of the channels (K,) stands out by its size: most often none does, and nothing else is looked at."""
    middle = loud.median()
    return bool(middle > 0) and bool((loud / middle >= OUTLIER_RATIO).any())


def factors_of(loud: Tensor, quiet: Tensor) -> Tensor | None:
    """Return the powers of two that channels are divided by; None if no channel is an outlier.

    loud: (K,) sizes of the channels; quiet: (K,) largest weights that read them. A factor is the square root of the
    two ratios to the median, so that afterwards both are as far from it.
    """
    middle, usual = loud.median(), quiet.median()
    if not bool(middle > 0) or not bool(usual > 0):
        return None
    ratio = loud / middle
    outlying = ratio >= OUTLIER_RATIO
    if not bool(outlying.any()):
        return None
    least = torch.maximum(quiet / usual, 1 / ratio)  # a weight may be 0
    powers = (ratio / least).sqrt().log2().round().clamp(min=0)
    return torch.where(outlying, powers.exp2(), 1.0)


def _sizes(weight: Tensor, norm: NormSpec) -> Tensor:
    return (weight.float() + norm.offset).abs()


def _columns(weights: Iterable[Tensor]) -> Tensor:
    """Return the largest magnitude of each column of matrices."""
    return torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)


def _times(weight: Tensor, factors: Tensor) -> Tensor:
    return (weight * factors.to(weight.dtype)).contiguous()


def _divided(weights: Mapping[str, Tensor], name: str, norm: NormSpec, factors: Tensor) -> dict[str, Tensor]:
    """Return the weight and bias of a norm, divided."""
    weight = weights[name]
    found = {name: ((weight.float() + norm.offset) / factors - norm.offset).to(weight.dtype)}
    if norm.biased:
        found[name + BIAS] = (weights[name + BIAS].float() / factors).to(weight.dtype)
    return found
