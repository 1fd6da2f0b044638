"""Moves outlier channels out of int8 activations and into weights (Xiao et al., 2023, "SmoothQuant").

They move from norms to the weights that read them, and from up projections to down projections. Half of the ratio
moves, and sizes of weights replace measured activations. Factors are powers of two, which leave the results of an
unquantised model bit by bit equal.
"""

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

# A channel is an outlier from this ratio to the median channel on. Most checkpoints have none
OUTLIER_RATIO = 4.0


class SmoothedWeights(Weights):
    """A source of a model's weights with smaller outlier channels, for matrix products that are quantised on loading.

    The outputs of norms and up projections are divided by factors in outlier channels. The weights that read these
    channels are multiplied by the same factors, so the model computes the same function.

    Args:
        weights: The source of the unchanged weights.
        spec: The model, or the rank's shard.
        ranks: The ranks among which experts are divided, which use the same factors. None: a single rank.
    """

    def __init__(self, weights: Weights, spec: ModelSpec, ranks: Group | None = None) -> None:
        self._weights, self._spec, self._ranks = weights, spec, ranks or SingleRankGroup()

    def tables(self) -> Tables:
        """Return the weights outside of layers.

        Outlier channels are divided in the final norm, and multiplied in the head.
        """
        tables, norm = self._weights.tables(), self._spec.final_norm
        if norm is None or not self._spec.has_head or not _is_rounded(self._spec.head):
            return tables
        sizes = _channel_sizes(tables.norms[FINAL_NORM], norm)
        factors = factors_of(sizes, _column_maxima([tables.head])) if has_outliers(sizes) else None
        if factors is None:
            return tables
        norms = {**tables.norms, **_divide_norm(tables.norms, FINAL_NORM, norm, factors)}
        return replace(tables, head=_multiply(tables.head, factors), norms=norms)

    def layer(self, index: int) -> LayerWeights:
        """Return a layer's weights.

        Outlier channels are divided in norms and up projections, and multiplied in the weights that read them.
        """
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
    """Return True if the weight is quantised to int8 or int4 on loading.

    The product then also rounds its inputs to int8.
    """
    form = linear.form
    return form is not None and form.codes in ("int4", "int8") and not form.stored


def _smooth_norm(
    weights: dict[str, Tensor], name: str, norm: NormSpec, readers: list[LinearSpec], ranks: Group
) -> None:
    """Divide the outlier channels in the weight of a norm, and multiply them in all matrix products that read the norm.

    Args:
        weights: The weights of the layer. Changed entries are replaced.
        name: The name of the norm.
        norm: The norm.
        readers: The products that read the norm's outputs.
        ranks: The ranks that hold parts of the readers.
    """
    if not any(map(_is_rounded, readers)) or any(reader.stored for reader in readers):
        return
    sizes = _channel_sizes(weights[name], norm)
    if not has_outliers(sizes):  # equal on all ranks, as each has this norm
        return
    columns = ranks.all_gather(_column_maxima(weights[reader.name] for reader in readers)).amax(0)
    factors = factors_of(sizes, columns)
    if factors is not None:
        weights |= _divide_norm(weights, name, norm, factors)
        weights |= {reader.name: _multiply(weights[reader.name], factors) for reader in readers}
        for reader in readers:
            scale_factors(weights, reader.name + FACTOR_A, factors)


def _smooth_half(weights: dict[str, Tensor], first: LinearSpec, second: LinearSpec) -> None:
    """Divide outlier channels in the outputs of up projections, and multiply them in the inputs of down projections.

    Each expert has its own factors.

    Args:
        weights: The weights of the layer. Changed entries are replaced.
        first: The matrix product of gate and up projection.
        second: The matrix product of the down projection.
    """
    if not _is_rounded(second) or first.stored:
        return
    count = max(1, first.experts)
    into, back = weights[first.name], weights[second.name]
    ups, downs = into.view(count, 2, -1, into.shape[1])[:, 1], back.view(count, -1, back.shape[1])
    sizes = ups.float().norm(dim=-1)
    each = [
        factors_of(size, _column_maxima([down])) if has_outliers(size) else None
        for size, down in zip(sizes, downs, strict=True)
    ]
    if all(factors is None for factors in each):
        return
    ones = torch.ones(back.shape[1], device=back.device)
    factors = torch.stack([ones if found is None else found for found in each])
    gates = torch.ones_like(factors)
    divisors = torch.stack((gates, factors), 1).reshape(-1)
    weights[first.name] = _multiply(into, 1 / divisors[:, None])
    if first.biased:
        bias = weights[first.name + BIAS]
        weights[first.name + BIAS] = _multiply(bias, 1 / divisors)
    weights[second.name] = _multiply(downs, factors[:, None]).view(back.shape)
    if count == 1:  # experts have no adapters
        scale_factors(weights, first.name + FACTOR_B, 1 / divisors[:, None])
        scale_factors(weights, second.name + FACTOR_A, factors[0])


def scale_factors(weights: dict[str, Tensor], start: str, factors: Tensor) -> None:
    """Multiply A or B of all LoRA adapters of a matrix product by the factors by which its weight was multiplied.

    Args:
        weights: The tensors of a layer. Changed entries are replaced.
        start: Prefix of the names of these A or B, such as "qkv.factor_a.".
        factors: The multipliers, which broadcast with A (rank, in) or B (out, rank).
    """
    for name in [name for name in weights if name.startswith(start)]:
        weights[name] = _multiply(weights[name], factors)


def has_outliers(sizes: Tensor) -> bool:
    """Return True if any channel is at least OUTLIER_RATIO times as large as the median channel.

    If the median is 0, the result is False.

    Args:
        sizes: (K,), the magnitudes of the channels.
    """
    median = sizes.median()
    return bool(median > 0) and bool((sizes / median >= OUTLIER_RATIO).any())


def factors_of(sizes: Tensor, columns: Tensor) -> Tensor | None:
    """Return the powers of two by which to divide channels, (K,), 1 for most; None if no channel is an outlier.

    After scaling, an outlier channel and the weights that read it exceed their medians by about the same ratio.

    Args:
        sizes: (K,), the magnitudes of the channels.
        columns: (K,), the largest magnitudes of the weights that read each channel.
    """
    median, usual = sizes.median(), columns.median()
    if not bool(median > 0) or not bool(usual > 0):
        return None
    ratio = sizes / median
    outlying = ratio >= OUTLIER_RATIO
    if not bool(outlying.any()):
        return None
    least = torch.maximum(columns / usual, 1 / ratio)  # weights may be 0
    powers = (ratio / least).sqrt().log2().round().clamp(min=0)
    return torch.where(outlying, powers.exp2(), 1.0)


def _channel_sizes(weight: Tensor, norm: NormSpec) -> Tensor:
    return (weight.float() + norm.offset).abs()


def _column_maxima(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.abs().amax(0).float() for weight in weights]).amax(0)


def _multiply(weight: Tensor, factors: Tensor) -> Tensor:
    return (weight * factors.to(weight.dtype)).contiguous()


def _divide_norm(
    weights: Mapping[str, Tensor], name: str, norm: NormSpec, factors: Tensor
) -> dict[str, Tensor]:
    weight = weights[name]
    found = {name: ((weight.float() + norm.offset) / factors - norm.offset).to(weight.dtype)}
    if norm.biased:
        found[name + BIAS] = (weights[name + BIAS].float() / factors).to(weight.dtype)
    return found
