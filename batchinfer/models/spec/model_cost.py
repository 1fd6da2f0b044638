"""The cost of a step of a model, derived from its spec. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
    own_caches,
)
from batchinfer_kernels.arithmetic import Device, WeightForm
from batchinfer_kernels.cost import (
    Cost,
    DecompressionFlops,
    LatentSizes,
    ModelCost,
    OperatorCost,
    activation_cost,
    attention_cost,
    block_fp8_grouped_linear_cost,
    block_fp8_linear_cost,
    cap_cost,
    combine_cost,
    copy_parts_cost,
    embedding_cost,
    gated_activation_cost,
    grouped_linear_cost,
    int4_grouped_linear_cost,
    int4_linear_cost,
    latent_attention_cost,
    latent_store_cost,
    layer_norm_cost,
    linear_cost,
    mxfp4_grouped_linear_cost,
    mxfp4_linear_cost,
    quantized_grouped_linear_cost,
    quantized_linear_cost,
    rms_norm_cost,
    rope_store_cost,
    routing_cost,
    sample_cost,
    scale_cost,
    sparse_linear_cost,
    weight_only_linear_cost,
)


def loaded_bytes(spec: ModelSpec, parameters: int, itemsize: int) -> int:
    """Return the bytes of a model's loaded weights.

    An output layer (lm_head) that is tied to the embedding takes no bytes, unless it is a quantised copy.

    Args:
        spec: The model.
        parameters: The number of values in all tensors of the model.
        itemsize: Bytes of a value that is not quantised.
    """
    coded = [linear for linear in spec.linears() if linear.form is not None]
    head = [spec.head] if spec.head_form is not None and spec.has_head else []
    taken = sum(
        round(one.values * one.form.value_bytes(itemsize)) for one in (*coded, *head) if one.form is not None
    )
    plain = parameters - sum(one.values for one in (*coded, *([] if spec.tied and spec.begins else head)))
    return taken + plain * itemsize


def model_cost(
    spec: ModelSpec, itemsize: int, device: Device = "cpu", deterministic: bool = False
) -> ModelCost:
    """Return the FLOPs and memory traffic of a model's operators, per step, token, sampled row and so on.

    Args:
        spec: The model.
        itemsize: Bytes of an activation, and of weights and cached values that are not quantised.
        device: The device whose operators run.
        deterministic: True if the run is deterministic. Then a GPU does not use some faster operators.
    """
    summed: dict[str, OperatorCost] = {}
    for layer, times in Counter(spec.layers).items():
        for operator in _layer_operators(layer, itemsize, device):
            known = summed.get(operator.name, OperatorCost(operator.name))
            summed[operator.name] = known + operator * times
    embedding = Cost() if not spec.begins else _embedding(spec, itemsize)
    once = (
        OperatorCost("embedding", token=embedding),
        _attention(spec, itemsize, device == "cuda" and not deterministic),
        OperatorCost("copy_parts", copied=_copying(spec, itemsize)),
        *_after_layers(spec, itemsize),
    )
    return ModelCost(
        operators=(*summed.values(), *once),
        windows=spec.windows,
        parameters=sum(linear.values for linear in spec.linears()),
        active_parameters=sum(linear.active_values for linear in spec.linears()),
        head_parameters=spec.head.values if spec.has_head else 0,
        caches=tuple(
            (cache.window, cache.token_bytes(itemsize)) for cache in own_caches(spec.caches).values()
        ),
        itemsize=itemsize,
        weight_itemsize=_value_bytes(spec, itemsize),
        causal=spec.causal,
    )


def _value_bytes(spec: ModelSpec, itemsize: int) -> float:
    values = Counter[float]()
    for linear in spec.linears():
        values[itemsize if linear.form is None else linear.form.value_bytes(itemsize)] += linear.values
    return values.most_common(1)[0][0]


def _embedding(spec: ModelSpec, itemsize: int) -> Cost:
    found = embedding_cost(1, spec.hidden, itemsize) * (1 + spec.learned_positions)
    if spec.embedding_multiplier != 1:
        found += scale_cost(1, spec.hidden, itemsize)
    if spec.encoder is not None and spec.encoder.embedding_norm is not None:
        found += _norm(spec.encoder.embedding_norm, 1, itemsize, residual=False)
    return found


def _after_layers(spec: ModelSpec, itemsize: int) -> Iterator[OperatorCost]:
    norm = spec.final_norm if spec.ends else None
    if norm is not None:
        yield _per_sampled_row("final_norm", lambda n: _norm(norm, n, itemsize, residual=True))
    if spec.has_head:
        yield _per_sampled_row("lm_head", _linear(spec.head, itemsize))
        yield from _after_head(spec)
        yield _per_sampled_row("sample", lambda n: sample_cost(n, spec.vocab, itemsize))


def _after_head(spec: ModelSpec) -> Iterator[OperatorCost]:
    if spec.logit_multiplier != 1:
        yield _per_sampled_row("logit_multiplier", lambda n: scale_cost(n, spec.rows, 4))
    if spec.logit_cap is not None:
        yield _per_sampled_row("logit_cap", lambda n: cap_cost(n, spec.rows))


def _layer_operators(layer: LayerSpec, itemsize: int, device: Device) -> Iterator[OperatorCost]:
    attention = layer.attention
    yield _per_token("rms_norm", lambda n: _norms(layer, n, itemsize))
    if attention is not None:
        yield _per_token("rope_store", _store(attention, itemsize))
    for linear in layer.linears:
        if linear.heads:
            assert isinstance(attention, LatentAttentionSpec)
            yield _per_token(linear.name, _heads(attention, linear.form, itemsize))
        elif linear.experts:
            yield _experts(linear, itemsize, device)
        else:
            yield _per_token(linear.name, _linear(linear, itemsize, device))
        if linear.activation is not None:
            yield _activation(linear, itemsize)
    if layer.residual_multiplier != 1:
        halves = 1 if attention is None else 2
        yield _per_token("residual_multiplier", lambda n: scale_cost(n * halves, layer.hidden, itemsize))
    if isinstance(layer.feed_forward, ExpertsSpec):
        routing = layer.feed_forward.routing
        yield _per_token("routing", lambda n: routing_cost(n, routing.experts, routing.chosen))
        yield _per_token("combine", lambda n: combine_cost(n, routing.chosen, layer.hidden, itemsize))


def _store(attention: AttentionSpec | LatentAttentionSpec, itemsize: int) -> Callable[[int], Cost]:
    heads, rotation = attention.q_heads, attention.rotation
    turned = rotation.dim if rotation.rope else 0
    if isinstance(attention, LatentAttentionSpec):
        return lambda n: latent_store_cost(n, heads, attention.rank, turned, itemsize)
    kv_heads = attention.kv_heads if attention.kv_layer is None else 0
    return partial(
        rope_store_cost,
        q_heads=heads,
        kv_heads=kv_heads,
        head_dim=attention.head_dim,
        itemsize=itemsize,
        rotary_dim=turned,
        codes=attention.cache_dtype if kv_heads else None,
        normed=attention.norms_heads,
    )


def _heads(attention: LatentAttentionSpec, form: WeightForm | None, itemsize: int) -> Callable[[int], Cost]:
    into = _linear(LinearSpec("", attention.plain_dim, (("", attention.rank),), form=form), itemsize)
    out = _linear(LinearSpec("", attention.rank, (("", attention.v_dim),), form=form), itemsize)
    return lambda n: (into(n) + out(n)) * attention.q_heads


def _attention(spec: ModelSpec, itemsize: int, decompresses: bool) -> OperatorCost:
    # Pairs of query and key, and cached tokens, are counted over all layers, so each has the mean cost of a layer
    each = [_attention_of(layer.attention, itemsize) for layer in spec.layers if layer.attention is not None]
    whole = sum(each[1:], each[0])
    pair, read = (Cost(c.flops // len(each), c.bytes // len(each)) for c in (whole.pair, whole.kv_token))
    decompressing = _decompressing(spec) if decompresses else None
    return replace(whole, pair=pair, kv_token=read, decompressing=decompressing)


def _decompressing(spec: ModelSpec) -> DecompressionFlops | None:
    # K and V are never computed from quantised kv_b weights
    sizes = []
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, LatentAttentionSpec):
            if any(linear.heads and linear.form is not None for linear in layer.linears):
                return None
            turned = attention.rotation.dim
            own = LatentSizes(attention.rank, attention.plain_dim, turned, attention.v_dim)
            sizes.append((own, attention.q_heads))
        elif attention is not None:
            return None
    if not sizes:
        return None
    pair, made = (sum(heads * getattr(own, of) for own, heads in sizes) for of in ("pair", "made"))
    return DecompressionFlops(pair // len(sizes), made // len(sizes), len(sizes))


def _attention_of(attention: AttentionSpec | LatentAttentionSpec, itemsize: int) -> OperatorCost:
    if isinstance(attention, LatentAttentionSpec):
        cost = partial(
            latent_attention_cost,
            heads=attention.q_heads,
            width=attention.head_dim,
            rank=attention.rank,
            itemsize=itemsize,
        )
    else:
        cost = partial(
            attention_cost,
            q_heads=attention.q_heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            itemsize=itemsize,
            coded=attention.cache_dtype is not None,
        )
    return OperatorCost("attention", token=cost(1, 0, 0), pair=cost(0, 1, 0), kv_token=cost(0, 0, 1))


def _copying(spec: ModelSpec, itemsize: int) -> Cost:
    each = own_caches(spec.caches).values()
    costs = (copy_parts_cost(1, c.heads, c.dim, itemsize, c.tensors, c.dtype is not None) for c in each)
    return sum(costs, Cost())


def _activation(linear: LinearSpec, itemsize: int) -> OperatorCost:
    if linear.gated:
        width = linear.outputs // 2
        return _per_token("activation", lambda n: gated_activation_cost(n * linear.chosen, width, itemsize))
    return _per_token("activation", lambda n: activation_cost(n * linear.chosen, linear.outputs, itemsize))


def _experts(linear: LinearSpec, itemsize: int, device: Device) -> OperatorCost:
    # The first product (gate_up) reads each token once, the second one a row per token and chosen expert
    def cost(tokens: int, hit: int) -> Cost:
        rows = tokens * linear.chosen
        read, inputs, outputs = tokens if linear.gated else rows, linear.inputs, linear.outputs
        if linear.form is not None and linear.form.codes == "int4":
            sizes, coded = (rows, hit, inputs, outputs, itemsize), device == "cpu"
            return int4_grouped_linear_cost(*sizes, linear.form.group, tokens=read, coded=coded)
        if linear.form is not None and linear.form.codes == "mxfp4":
            return mxfp4_grouped_linear_cost(rows, hit, inputs, outputs, itemsize, tokens=read)
        if linear.form is not None and linear.form.scales == "block":
            return block_fp8_grouped_linear_cost(rows, hit, inputs, outputs, itemsize, tokens=read)
        if linear.form is not None:
            return quantized_grouped_linear_cost(rows, hit, inputs, outputs, itemsize, tokens=read)
        return grouped_linear_cost(rows, hit, inputs, outputs, itemsize, itemsize, tokens=read)

    each = OperatorCost(linear.name, token=cost(1, 0), expert=cost(0, 1))
    return replace(each, experts=linear.experts, chosen=linear.chosen)


def _norms(layer: LayerSpec, tokens: int, itemsize: int) -> Cost:
    # Norms before a half also add the residual, and rope_store computes norms of q and k
    found = Cost()
    for name, norm in layer.norms.items():
        attention = layer.attention
        of_heads = isinstance(attention, AttentionSpec) and attention.norms_heads
        if not (of_heads and name in ("q_norm", "k_norm")):
            residual = layer.norms_sums or name in ("input_norm", "post_norm")
            found += _norm(norm, tokens, itemsize, residual)
    return found


def _norm(norm: NormSpec, tokens: int, itemsize: int, residual: bool) -> Cost:
    if norm.kind == "layer":
        return layer_norm_cost(tokens, norm.width, itemsize, residual, norm.biased)
    return rms_norm_cost(tokens, norm.width, itemsize, residual)


def _linear(linear: LinearSpec, itemsize: int, device: Device = "cpu") -> Callable[[int], Cost]:
    inputs, outputs, form = linear.inputs, linear.outputs, linear.form
    if form is None:
        return lambda n: linear_cost(n, inputs, outputs, itemsize, itemsize)
    if form.codes == "sparse":
        return lambda n: sparse_linear_cost(n, inputs, outputs, itemsize)
    if form.scales == "block":
        return lambda n: block_fp8_linear_cost(n, inputs, outputs, itemsize)
    if form.codes == "mxfp4":
        return lambda n: mxfp4_linear_cost(n, inputs, outputs, itemsize)
    if form.scales == "group" and device == "cuda":
        return lambda n: weight_only_linear_cost(n, inputs, outputs, itemsize, group=form.group)
    if form.scales == "group":
        return lambda n: int4_linear_cost(n, inputs, outputs, itemsize, form.group)
    return lambda n: quantized_linear_cost(n, inputs, outputs, itemsize)


def _per_token(name: str, cost: Callable[[int], Cost]) -> OperatorCost:
    return OperatorCost(name, step=cost(0), token=cost(1) - cost(0))


def _per_sampled_row(name: str, cost: Callable[[int], Cost]) -> OperatorCost:
    return OperatorCost(name, step=cost(0), sampled=cost(1) - cost(0), only_sampled=True)
