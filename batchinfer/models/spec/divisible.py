"""Finds channels that can be divided between two products without changing the function of a layer. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.models.spec.spec import (
    SHARED,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
)

# Activations of the gate that are multiplied with the up projection, which itself has no activation
_MULTIPLIED = ("silu", "gelu", "gelu_tanh")


def norm_readers(layer: LayerSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (norm, matrix products), by name, for each norm whose outputs only these matrix products of the layer read.

    Calibration can divide the norm's weight by factors, and multiply the products' weights by them.

    Args:
        layer: The layer.
    """
    feeding = tuple(_first_of(layer.feed_forward))
    alone = layer.parallel and layer.post_norm is None
    if layer.input_norm is not None and layer.attention is not None:
        yield "input_norm", (*_first_of_attention(layer.attention), *(feeding if alone else ()))
    if layer.post_norm is not None:
        yield "post_norm", feeding


def _first_of_attention(attention: AttentionSpec | LatentAttentionSpec) -> tuple[str, ...]:
    if isinstance(attention, AttentionSpec):
        return (attention.first,)
    return ("q" if attention.q_rank is None else "q_a", "kv_a")


def _first_of(fed: FeedForwardSpec | ExpertsSpec) -> Iterator[str]:
    if isinstance(fed, FeedForwardSpec):
        yield fed.first
        return
    yield from ("router", "experts.gate_up")
    if fed.shared is not None:
        yield SHARED + fed.shared.first
    if fed.shared_gated:
        yield "shared_gate"


def gated_halves(layer: LayerSpec) -> Iterator[tuple[str, str]]:
    """Yield the names (gate_up, down) of the two matrix products of each gated feed-forward half of a layer.

    Factors can be moved from the inputs of `down` to the outputs of the up projection, which has no activation.
    """
    fed = layer.feed_forward
    dense = [("", fed)] if isinstance(fed, FeedForwardSpec) else []
    if isinstance(fed, ExpertsSpec):
        if fed.activation in _MULTIPLIED:
            yield "experts.gate_up", "experts.down"
        dense = [(SHARED, fed.shared)] if fed.shared is not None else []
    for start, half in dense:
        if half.gated and half.activation in _MULTIPLIED:
            yield start + half.first, start + "down"
