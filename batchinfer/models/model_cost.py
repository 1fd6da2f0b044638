"""What a step of a model costs, derived from its spec. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from batchinfer.models.spec import LayerSpec, LinearSpec, ModelSpec, NormSpec
from batchinfer_kernels.cost import (
    Cost,
    ModelCost,
    OperatorCost,
    activation_cost,
    attention_cost,
    embedding_cost,
    gated_activation_cost,
    layer_norm_cost,
    linear_cost,
    quantized_linear_cost,
    rms_norm_cost,
    rope_store_cost,
    sample_cost,
)


def model_cost(spec: ModelSpec, itemsize: int, weight_itemsize: int) -> ModelCost:
    """`itemsize`: bytes of an activation and of a cached value; `weight_itemsize`: of a weight of a linear layer;
    1: int8."""
    attention, layers = spec.attention, len(spec.layers)
    summed: dict[str, OperatorCost] = {}
    for layer, times in Counter(spec.layers).items():
        for operator in _layer_operators(layer, itemsize, weight_itemsize):
            known = summed.get(operator.name, OperatorCost(operator.name))
            summed[operator.name] = known + operator * times
    sizes = (attention.q_heads, attention.kv_heads, attention.head_dim, itemsize)
    once = (
        OperatorCost(
            "embedding", token=embedding_cost(1, spec.hidden, itemsize) * (1 + spec.learned_positions)
        ),
        OperatorCost(
            "attention",
            token=attention_cost(1, 0, 0, *sizes) * layers,
            pair=attention_cost(0, 1, 0, *sizes),
            kv_token=attention_cost(0, 0, 1, *sizes),
        ),
        _sampled("final_norm", lambda n: _norm(spec.final_norm, n, itemsize, residual=True)),
        _sampled("lm_head", _linear(spec.head, itemsize, weight_itemsize)),
        _sampled("sample", lambda n: sample_cost(n, spec.vocab, itemsize)),
    )
    return ModelCost(
        operators=(*summed.values(), *once),
        layers=layers,
        active_parameters=sum(linear.values for linear in spec.linears()),
        head_parameters=spec.head.values,
        kv_bytes_per_token=itemsize * sum(layer.attention.cache.values for layer in spec.layers),
        itemsize=itemsize,
        weight_itemsize=weight_itemsize,
    )


def _layer_operators(layer: LayerSpec, itemsize: int, weight_itemsize: int) -> Iterator[OperatorCost]:
    attention, fed = layer.attention, layer.feed_forward
    heads = (attention.q_heads, attention.kv_heads, attention.head_dim, itemsize)
    turned, normed = attention.rotation.dim if attention.rotation.rope else 0, attention.norms_heads
    activation = gated_activation_cost if fed.gated else activation_cost
    yield _token("rms_norm", lambda n: _norms(layer, n, itemsize))
    for linear in layer.linears:
        yield _token(linear.name, _linear(linear, itemsize, weight_itemsize))
    yield _token("rope_store", lambda n: rope_store_cost(n, *heads, rotary_dim=turned, normed=normed))
    yield _token("activation", lambda n: activation(n, fed.inner, itemsize))


def _norms(layer: LayerSpec, tokens: int, itemsize: int) -> Cost:
    """Those of the hidden state, which add the residual where they stand before a half of the layer, and those of q and
    k where they are no heads' norms, which `rope_store` has."""
    found = Cost()
    for name, norm in layer.norms.items():
        if not (layer.attention.norms_heads and name in ("q_norm", "k_norm")):
            residual = name in ("input_norm", "post_norm")
            found += _norm(norm, tokens, itemsize, residual)
    return found


def _norm(norm: NormSpec, tokens: int, itemsize: int, residual: bool) -> Cost:
    if norm.kind == "layer":
        return layer_norm_cost(tokens, norm.width, itemsize, residual, norm.biased)
    return rms_norm_cost(tokens, norm.width, itemsize, residual)


def _linear(linear: LinearSpec, itemsize: int, weight_itemsize: int) -> Callable[[int], Cost]:
    sizes = (linear.inputs, linear.outputs, itemsize)
    if weight_itemsize == 1:
        return lambda n: quantized_linear_cost(n, *sizes)
    return lambda n: linear_cost(n, *sizes, weight_itemsize)


def _token(name: str, cost: Callable[[int], Cost]) -> OperatorCost:
    """Of an operator that every token passes: its cost is linear in their number."""
    return OperatorCost(name, step=cost(0), token=cost(1) - cost(0))


def _sampled(name: str, cost: Callable[[int], Cost]) -> OperatorCost:
    """Of one that sees nothing but the sampled rows."""
    return OperatorCost(name, step=cost(0), sampled=cost(1) - cost(0), only_sampled=True)
