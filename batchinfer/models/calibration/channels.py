"""Scales channels of a layer's inputs such that rounding the weights changes the layer's outputs less.

Channels are divided by a factor, and the weights that read them multiplied, which leaves the layer's function unchanged
(Lin et al., 2024, "AWQ").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer.models.calibration.work import OUTPUTS_TRIED, POWERS
from batchinfer.models.checkpoint.smoothing import scale_factors
from batchinfer.models.spec.divisible import gated_halves, norm_readers
from batchinfer.models.spec.parameters import BIAS, FACTOR_A, FACTOR_B
from batchinfer.models.spec.spec import AttentionSpec, LayerSpec, LinearSpec, NormSpec
from batchinfer_kernels.int4_feedback import output_error
from batchinfer_kernels.int4_linear import quantize_groups

LARGEST = 64.0  # upper bound of a channel's factor; the lower bound is 1 / LARGEST

Weights = dict[str, Tensor]
Products = Mapping[str, Tensor]


def _clamped(_: Weights, factors: Tensor) -> Tensor:
    return factors.clamp(1 / LARGEST, LARGEST)


@dataclass(frozen=True, slots=True)
class ScalableOutputs:
    """Outputs of a norm or weight that can be divided by factors if the weights that read them are multiplied by them.

    Such a scaling of channels does not change the function of the layer.

    Args:
        readers: The matrix products that read the outputs.
        divide: Divides the outputs by factors, by changing the layer's weights. Returns the factors after rounding.
        spread: Returns a factor per input of the readers, given a factor per output.
        merge: Returns a magnitude per output, given a magnitude per input of the readers.
        fit: Returns the allowed factors that are nearest to the wanted ones. Its arguments are the layer's weights and
            the wanted factors.
    """

    readers: tuple[LinearSpec, ...]
    divide: Callable[[Weights, Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]
    merge: Callable[[Tensor], Tensor]
    fit: Callable[[Weights, Tensor], Tensor] = _clamped


def scale_channels(
    layer: LayerSpec, weights: Weights, products: dict[str, Tensor], group: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Scale the channels of a layer's activations such that rounding weights to int4 changes the layer's outputs less.

    Args:
        layer: The layer.
        weights: Its weights, float32. Changed entries are replaced. Weights of experts change in place, as they may
            take most of the memory. Norms stay representable in `dtype`.
        products: X^T X of the inputs X of each matrix product to round, by name of the product. Entries of products
            whose inputs are scaled are replaced.
        group: Number of consecutive inputs that share a scale in int4.
        dtype: The dtype of the checkpoint to write.

    Returns:
        The factors by which the inputs of each product were divided, (in,), by name. Products with unscaled inputs are
        left out.
    """
    divisors: dict[str, Tensor] = {}
    for scaled in _divisible(layer, dtype):
        read = [linear for linear in scaled.readers if linear.name in products]
        if not read or any(linear.experts and linear not in read for linear in scaled.readers):
            continue
        factors = _search_factors(scaled, read, weights, products, group)
        if factors is None:
            continue
        columns = scaled.spread(scaled.divide(weights, factors))
        for linear in scaled.readers:
            divisors[linear.name] = columns
            if linear.experts:
                weights[linear.name].mul_(columns)
            else:
                weights[linear.name] = weights[linear.name] * columns
            scale_factors(weights, linear.name + FACTOR_A, columns)
        for linear in read:
            products[linear.name] = products[linear.name] / columns / columns[:, None]
    return divisors


def _search_factors(
    scaled: ScalableOutputs, read: Sequence[LinearSpec], weights: Weights, products: Products, group: int
) -> Tensor | None:
    sizes = products[read[0].name].diagonal().sqrt()
    sizes = scaled.merge(sizes / sizes.mean().clamp_min(1e-30)).clamp_min(1e-4)
    best, least = None, torch.inf
    for power in POWERS:
        factors = sizes.pow(power)
        factors = scaled.fit(weights, factors / (factors.max() * factors.min()).sqrt())
        columns = scaled.spread(factors)
        error = sum(
            float(_error(weights[linear.name], products[linear.name], columns, group)) for linear in read
        )
        if error < least:
            best, least = (factors if power else None), error
    return best


def _error(weight: Tensor, products: Tensor, columns: Tensor, group: int) -> Tensor:
    """Return the squared error of a product's outputs after rounding its weight, estimated from a subset of them.

    Args:
        weight: (out, in).
        products: (in, in), X^T X of the inputs X.
        columns: (in,), factors by which columns of the weight are multiplied before rounding, and divided after it.
        group: Number of consecutive inputs that share a scale.
    """
    every = -(-len(weight) // OUTPUTS_TRIED)
    weight = weight[::every]
    codes, scales = quantize_groups(weight * columns, group)
    spread = scales.repeat_interleave(group, dim=1)[:, : weight.shape[1]]
    return output_error(codes * spread / columns - weight, products) * every


def _divisible(layer: LayerSpec, dtype: torch.dtype) -> Iterator[ScalableOutputs]:
    linears = {linear.name: linear for linear in layer.linears}
    for name, readers in norm_readers(layer):
        norm, reading = layer.norms[name], tuple(linears[reader] for reader in readers)
        if not any(linear.exact for linear in reading):
            yield _of_norm(name, norm, reading, dtype)
        elif not norm.offset:
            yield _of_routed_norm(name, norm, reading, dtype)
    for up, down in gated_halves(layer):
        if not linears[down].experts:
            yield _of_up(linears[up], linears[down])
    attention = layer.attention
    if isinstance(attention, AttentionSpec) and attention.kv_layer is None:
        yield _of_values(attention, linears["qkv"], linears["o"])


def _same(channels: Tensor) -> Tensor:
    return channels


def _of_norm(
    name: str, norm: NormSpec, readers: tuple[LinearSpec, ...], dtype: torch.dtype
) -> ScalableOutputs:
    def divide(weights: Weights, factors: Tensor) -> Tensor:
        before = weights[name] + norm.offset
        weights[name] = (before / factors - norm.offset).to(dtype).float()
        after = weights[name] + norm.offset
        found = torch.where((before != 0) & (after != 0), before / after, 1.0)
        if norm.biased:
            weights[name + BIAS] = weights[name + BIAS] / found
        return found

    return ScalableOutputs(readers, divide, _same, _same)


def _of_routed_norm(
    name: str, norm: NormSpec, readers: tuple[LinearSpec, ...], dtype: torch.dtype
) -> ScalableOutputs:
    # A scaled router must choose the same experts, so factors are exact: powers of two, or 1 where these round
    held = [name, *([name + BIAS] if norm.biased else [])]

    def divide(weights: Weights, factors: Tensor) -> Tensor:
        for parameter in held:
            weights[parameter] = weights[parameter] / factors
        return factors

    def fit(weights: Weights, factors: Tensor) -> Tensor:
        powers = _clamped(weights, factors).log2().round().exp2()
        divided = [(weights[parameter], 1 / powers) for parameter in held]
        exact = [(weights[linear.name], powers) for linear in readers if linear.exact]
        kept = [_holds(one, times, dtype) for one, times in (*divided, *exact)]
        return torch.where(torch.stack(kept).all(0), powers, 1.0)

    return ScalableOutputs(readers, divide, _same, _same, fit)


def _holds(weight: Tensor, times: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (channels,) bool: True for channels that can be scaled exactly, although weights are rounded to `dtype`.

    Args:
        weight: (…, channels).
        times: (channels,), the multipliers of the channels.
        dtype: The dtype of the checkpoint to write.
    """
    same = (weight * times).to(dtype).float() == weight.to(dtype).float() * times
    return same.view(-1, same.shape[-1]).all(0)


def _of_up(first: LinearSpec, second: LinearSpec) -> ScalableOutputs:
    return ScalableOutputs(
        (second,), lambda weights, factors: _divide_last(weights, first, factors), _same, _same
    )


def _of_values(attention: AttentionSpec, first: LinearSpec, second: LinearSpec) -> ScalableOutputs:
    heads, width = attention.kv_heads, attention.head_dim

    def spread(factors: Tensor) -> Tensor:
        return factors.view(heads, 1, width).expand(-1, attention.group, -1).reshape(-1)

    def merge(sizes: Tensor) -> Tensor:
        return sizes.view(heads, attention.group, width).square().mean(1).sqrt().reshape(-1)

    return ScalableOutputs(
        (second,), lambda weights, factors: _divide_last(weights, first, factors), spread, merge
    )


def _divide_last(weights: Weights, linear: LinearSpec, factors: Tensor) -> Tensor:
    # In the weight, the bias and the factors of adapters
    for name in (linear.name, linear.name + BIAS) if linear.biased else (linear.name,):
        found = weights[name].clone()
        found[-len(factors) :] /= factors if found.dim() == 1 else factors[:, None]
        weights[name] = found
    divisors = torch.ones(linear.outputs, device=factors.device)
    divisors[-len(factors) :] = factors
    scale_factors(weights, linear.name + FACTOR_B, 1 / divisors[:, None])
    return factors
