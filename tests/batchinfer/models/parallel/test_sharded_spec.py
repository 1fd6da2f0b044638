"""Tests that the shards of all ranks together are exactly the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.ranks.division import Division
from batchinfer.engine.ranks.shards import check_division
from batchinfer.models.parallel.shard import ModelShard, ParameterShard, Portion, shard_layer, shard_table
from batchinfer.models.parallel.shard_spec import shard_spec, tensor_sizes
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.parameters import BIAS, layer_parameters, parameter_count, table_parameters
from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Rotation,
)
from batchinfer_kernels.routing import Routing

TURN = Rotation(None, 4)


@st.composite
def attentions(draw: st.DrawFn) -> AttentionSpec | LatentAttentionSpec:
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4]))
    if draw(st.booleans()):
        return LatentAttentionSpec(
            heads, 6, 4, 5, 1.0, TURN, draw(st.sampled_from([None, 7])), draw(st.booleans())
        )
    norm = draw(st.sampled_from([None, NormSpec(4, 1e-6), NormSpec(4, 1e-6, "layer", heads=0)]))
    norms = [norm and replace(norm, heads=None if norm.heads is None else n) for n in (heads, kv_heads)]
    return AttentionSpec(
        heads, kv_heads, 4, 1.0, TURN, sinks=draw(st.booleans()), q_norm=norms[0], k_norm=norms[1],
        qkv_bias=draw(st.booleans()), o_bias=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def halves(draw: st.DrawFn) -> FeedForwardSpec | ExpertsSpec:
    inner, biased = draw(st.sampled_from([4, 6, 8, 12])), draw(st.booleans())
    dense = FeedForwardSpec(inner, "silu", biased, draw(st.booleans()))
    if draw(st.booleans()):
        return dense
    shared = draw(st.sampled_from([None, dense]))
    routing = Routing(draw(st.integers(2, 7)), 2)
    return ExpertsSpec(routing, inner, "silu", biased, biased, shared, shared_gated=shared is not None)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    norm, attention = NormSpec(10, 1e-6), draw(attentions())
    layers = tuple(
        LayerSpec(10, norm, attention, norm, draw(halves())) for _ in range(draw(st.integers(1, 4)))
    )
    return ModelSpec(
        "llama", 10, draw(st.integers(4, 23)), layers, norm, draw(st.booleans()), 64, (), None, None,
        learned_positions=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ModelSpec, list[ModelShard]]:
    """Draw a model and the shards of all ranks of a layout."""
    spec, tensor = draw(specs()), draw(st.sampled_from([1, 2, 3, 4]))
    ranged = any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers) and draw(st.booleans())
    size = tensor if tensor > 1 or not ranged else 2
    borders = sorted(draw(st.sets(st.integers(1, len(spec.layers) - 1)))) if len(spec.layers) > 1 else []
    spans = [*zip([0, *borders], [*borders, len(spec.layers)], strict=True)]
    places = [
        ModelShard(
            Portion(rank, size) if tensor > 1 else Portion(),
            Portion(rank, size) if ranged else None,
            span if borders else None,
        )
        for span in spans
        for rank in range(size)
    ]
    return spec, places


def marked(shard: ParameterShard, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return 1 for each value of a parameter that a shard includes."""
    found = np.zeros(shape, np.int64)
    if not shard.elsewhere:
        spans = [slice(None) if span is None else slice(*span) for span in (shard.outputs, shard.inputs)]
        found[tuple(spans[: len(shape)])] = 1
    return found


@given(layouts())
def test_the_shards_together_are_the_model(layout: tuple[ModelSpec, list[ModelShard]]) -> None:
    """A value of a sharded weight is on one rank, or on the ranks that share a KV head. Other weights are on
    all ranks of their stage. Shapes match each rank's spec."""
    spec, places = layout
    try:
        parts = [shard_spec(spec, place) for place in places]
    except CannotSplit:
        return
    held: dict[tuple[int, str], np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = {}
    for own, place in zip(parts, places, strict=True):
        first = place.layers[0] if place.layers else 0
        for index, layer in enumerate(own.layers):
            whole = spec.layers[first + index]
            shapes, shards = layer_parameters(whole), shard_layer(whole, layer, place)
            assert shards.keys() == layer_parameters(layer).keys()
            for name, shard in shards.items():
                mark = marked(shard, shapes[name])
                if not shard.elsewhere:
                    assert mark.sum() == np.prod(layer_parameters(layer)[name])
                held[first + index, name] = held.get((first + index, name), 0) + mark
    for index, layer in enumerate(spec.layers):
        for name in layer_parameters(layer):
            copies = np.unique(held[index, name])
            assert len(copies) == 1
            assert copies[0] >= 1
            if name.endswith((".down" + BIAS, "o" + BIAS)) and places[0].tensor.size > 1:
                assert copies[0] == 1 or places[0].experts is not None
    check_tables(spec, parts)
    check_totals(spec, parts, places)


def check_tables(spec: ModelSpec, parts: list[ModelSpec]) -> None:
    rows = Counter[tuple[str, int]]()
    for own in parts:
        for name, shape in table_parameters(own).items():
            shard = shard_table(own, name)
            first, end = shard.outputs or (0, shape[0])
            assert end - first == shape[0]
            rows.update((name, row) for row in range(first, end))
    last = [own for own in parts if own.ends]
    assert all(rows["embedding", row] == rows["embedding", 0] >= 1 for row in range(spec.vocab))
    if last[0].begins and spec.tied:
        return
    assert all(rows["head", row] == rows["head", 0] >= 1 for row in range(spec.vocab))


def check_totals(spec: ModelSpec, parts: list[ModelSpec], places: list[ModelShard]) -> None:
    """Check that parameters and cache memory add up, and that the costs of products are not lower."""
    tied_apart = spec.tied and not parts[0].ends
    assert sum(map(parameter_count, parts)) >= parameter_count(spec) + tied_apart * spec.vocab * spec.hidden
    whole, cost = model_cost(spec, 4), [model_cost(own, 4) for own in parts]
    assert sum(each.parameters for each in cost) >= whole.parameters
    heads = sum(cache.heads for own in parts for cache in own.caches if cache is not None)
    assert heads >= sum(cache.heads for cache in spec.caches if cache is not None)


def refusal(spec: ModelSpec, size: int) -> str | None:
    """Return the reason why the model cannot be sharded on `size` tensor ranks, or None."""
    try:
        check_division(spec, Division(size))
    except CannotSplit as error:
        return str(error)
    return None


@given(specs())
def test_the_named_sizes_work(spec: ModelSpec) -> None:
    named = tensor_sizes(spec)
    told = {size: refusal(spec, size) for size in range(2, min(9, spec.vocab + 1))}
    assert [size for size, why in told.items() if why is None] == [size for size in named if size in told]
    assert all(why.endswith(", ".join(map(str, named))) for why in told.values() if why is not None)


def test_three_kv_heads_over_two_ranks_are_refused() -> None:
    """6 query heads could be sharded, but not the keys."""
    norm = NormSpec(24, 1e-6)
    layer = LayerSpec(24, norm, AttentionSpec(6, 3, 4, 1.0, TURN), norm, FeedForwardSpec(12, "silu"))
    spec = ModelSpec("llama", 24, 50, (layer,), norm, True, 64, (), None, None)
    with pytest.raises(CannotSplit, match=r"3 KV heads cannot be divided among 2 ranks; .* among 1, 3, 6$"):
        shard_spec(spec, ModelShard(Portion(0, 2)))
