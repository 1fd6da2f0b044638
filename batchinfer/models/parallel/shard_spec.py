"""The spec of a shard, and the bytes that its rank sends to other ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.shard import WHOLE_MODEL, ModelShard, Portion, Span
from batchinfer.models.spec.spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    HeldExpert,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    ModelSpec,
    NormSpec,
)
from batchinfer_kernels.arithmetic import WeightForm

FP8_BLOCK = 128  # width and height of a block of weights that share a scale
GROUP_UNIT = 8  # the inputs of an int4 group are a multiple of it
MAX_RANKS = 64  # largest number of ranks that an error message suggests
LOGIT_BYTES = 4
ARGMAX_BYTES = 16  # the greatest logit of a row and its token, both sent as float64


def shard_spec(spec: ModelSpec, shard: ModelShard) -> ModelSpec:
    """Return the spec of a rank's shard: of the layers, heads, columns and experts that the rank computes.

    Args:
        spec: The whole model.
        shard: The shard.

    Raises:
        CannotSplit: The model cannot be sharded like this. The message lists the possible numbers of ranks.
    """
    if shard.is_whole:
        return spec
    _check_model(spec, shard)
    try:
        layers = tuple(_layer(layer, shard, index) for index, layer in enumerate(spec.layers))
    except CannotSplit as error:
        raise CannotSplit(f"{error}; {_list_sizes(spec, shard)}") from None
    found = replace(spec, layers=layers)
    if not shard.tensor.is_whole:
        found = replace(found, tokens=shard.tensor.span(spec.vocab))
    return found if shard.layers is None else _stage(found, shard.layers)


def tensor_sizes(spec: ModelSpec, shard: ModelShard = WHOLE_MODEL) -> list[int]:
    """Return the numbers of ranks, up to MAX_RANKS, that can compute each layer together with tensor parallelism.

    Args:
        spec: The model.
        shard: How the model is divided in other ways, such as into stages.
    """
    # If a number divides the experts evenly, ranks hold whole experts
    evenly = expert_sizes(spec)
    every = (Portion(0, size) for size in range(1, MAX_RANKS + 1))
    ranges = replace(shard, placement=None)
    places = (replace(ranges, tensor=one, experts=one if one.size in evenly else None) for one in every)
    return [each.tensor.size for each in places if _divides(spec, each)]


def expert_sizes(spec: ModelSpec) -> list[int]:
    """Return the numbers of ranks, up to MAX_RANKS, that divide the experts of every layer evenly.

    Returns [] for a model without experts.
    """
    counts = {len(fed.numbers) for layer in spec.layers if isinstance(fed := layer.feed_forward, ExpertsSpec)}
    return [size for size in range(1, MAX_RANKS + 1) if counts and all(count % size == 0 for count in counts)]


def _divides(spec: ModelSpec, shard: ModelShard) -> bool:
    try:
        for layer in set(spec.layers):
            _layer(layer, shard, 0)
    except CannotSplit:
        return False
    return True


def _list_sizes(spec: ModelSpec, shard: ModelShard) -> str:
    sizes = ", ".join(map(str, tensor_sizes(spec, shard)))
    return f"its tensors can be divided among {sizes or 'no ranks'}"


def _check_model(spec: ModelSpec, shard: ModelShard) -> None:
    if spec.encoder is not None:
        raise CannotSplit(f"{spec.family} is an encoder; encoders are not sharded among ranks")
    divided = shard.experts is not None and not shard.experts.is_whole
    if divided and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers):
        raise CannotSplit(f"{spec.family} has no experts that ranks could divide")
    if not shard.tensor.is_whole and spec.vocab < shard.tensor.size:
        raise CannotSplit(
            f"a vocabulary of {spec.vocab} tokens has no part for each of {shard.tensor.size} ranks"
        )
    if shard.layers is None:
        return
    first, end = shard.layers
    if not 0 <= first < end <= len(spec.layers):
        raise CannotSplit(f"there are no layers {first} to {end - 1}; {spec.family} has {len(spec.layers)}")
    if all(layer.attention is None for layer in spec.layers[first:end]):
        raise CannotSplit(
            f"layers {first} to {end - 1} have no attention; a stage needs a layer that has one"
        )


def _stage(spec: ModelSpec, layers: Span) -> ModelSpec:
    first, end = layers
    own = tuple(_renumber(layer, first) for layer in spec.layers[first:end])
    return replace(spec, layers=own, begins=spec.begins and first == 0, ends=end == len(spec.layers))


def _renumber(layer: LayerSpec, first: int) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.kv_layer is None:
        return layer
    if attention.kv_layer < first:
        raise CannotSplit(
            f"a stage that begins with layer {first} has a layer that reads the K and V of layer {attention.kv_layer}"
        )
    return replace(layer, attention=replace(attention, kv_layer=attention.kv_layer - first))


def _layer(layer: LayerSpec, shard: ModelShard, index: int) -> LayerSpec:
    fed = layer.feed_forward
    found = replace(
        layer,
        attention=_attention(layer.attention, shard.tensor),
        feed_forward=_experts(fed, shard, index)
        if isinstance(fed, ExpertsSpec)
        else _columns(fed, shard.tensor),
    )
    pairs = [*zip(layer.linears, found.linears, strict=True)]
    for whole, own in pairs:
        _check_form(whole, own)
    forms = ((own.name, _own_form(whole, own)) for whole, own in pairs)
    return replace(found, forms=tuple((name, form) for name, form in forms if form is not None))


def _attention(
    spec: AttentionSpec | LatentAttentionSpec | None, share: Portion
) -> AttentionSpec | LatentAttentionSpec | None:
    if spec is None or share.is_whole:
        return spec
    heads = _part(spec.q_heads, share, "query heads")
    if isinstance(spec, LatentAttentionSpec):
        return replace(spec, q_heads=heads)
    kv_heads = 1 if share.size % spec.kv_heads == 0 else _part(spec.kv_heads, share, "KV heads")
    norms = _head_norm(spec.q_norm, spec, heads), _head_norm(spec.k_norm, spec, kv_heads)
    return replace(spec, q_heads=heads, kv_heads=kv_heads, q_norm=norms[0], k_norm=norms[1])


def _head_norm(norm: NormSpec | None, spec: AttentionSpec, heads: int) -> NormSpec | None:
    if norm is None or (norm.width == spec.head_dim and norm.heads is None):
        return norm
    if norm.heads is None:
        raise CannotSplit("it norms all query heads, or all keys, together")
    return replace(norm, heads=heads)


def _columns(spec: FeedForwardSpec, share: Portion) -> FeedForwardSpec:
    return replace(spec, inner=_part(spec.inner, share, "intermediate columns"))


def _experts(spec: ExpertsSpec, shard: ModelShard, index: int) -> ExpertsSpec:
    shared = None if spec.shared is None else _columns(spec.shared, shard.tensor)
    if shard.experts is None:
        return replace(spec, inner=_part(spec.inner, shard.tensor, "columns of an expert"), shared=shared)
    count = spec.routing.experts
    if count < shard.experts.size:
        raise CannotSplit(f"{count} experts have no part for each of {shard.experts.size} ranks")
    return replace(spec, held=_held_experts(count, shard.experts, shard.placement, index), shared=shared)


def _held_experts(
    count: int, share: Portion, placement: ExpertPlacement | None, layer: int
) -> tuple[HeldExpert, ...] | None:
    if share.is_whole:
        return None
    if placement is not None:
        return placement.held(layer, share.rank)
    return tuple(map(HeldExpert, range(*share.span(count))))


def _part(count: int, share: Portion, what: str) -> int:
    if count % share.size:
        raise CannotSplit(f"{count} {what} cannot be divided among {share.size} ranks")
    return count // share.size


def _own_form(whole: LinearSpec, own: LinearSpec) -> WeightForm | None:
    # If all inputs of the whole weight share a scale, the inputs of the rank's part form one group
    form = whole.form
    one = form is not None and form.group == whole.inputs
    return replace(form, group=own.inputs) if form is not None and one else form


def _check_form(whole: LinearSpec, own: LinearSpec) -> None:
    form = whole.form
    if form is None:
        return
    if not form.coded and (own.inputs, own.outputs) != (whole.inputs, whole.outputs):
        raise CannotSplit(f"the weight of {whole.name} is sparse, and is read as a whole")
    groups = GROUP_UNIT if form.group == whole.inputs else form.group
    inputs = FP8_BLOCK if form.scales == "block" else max(1, groups)
    if own.inputs != whole.inputs and own.inputs % inputs:
        raise CannotSplit(
            f"{own.inputs} of {whole.inputs} inputs of {whole.name} are no whole groups of {inputs} that share a scale"
        )
    wholes, owns = dict(whole.parts), dict(own.parts)
    for part, outputs in owns.items() if form.scales == "block" else ():
        if outputs != wholes[part] and outputs % FP8_BLOCK:
            raise CannotSplit(
                f"{outputs} of {wholes[part]} outputs of {part} are no whole blocks of {FP8_BLOCK} that share a scale"
            )


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """The amount of data that a rank exchanges in a step with the other ranks of the same layers.

    Args:
        sums: How often a step sums the hidden states of all its tokens over the ranks (all-reduce).
        token_bytes: Bytes of a token's hidden state.
        embedding: If True, the step also sums the embeddings of its tokens over the ranks.
        logits: Bytes that each rank sends per sampled row if all logits are needed.
        best: Bytes that each rank sends per sampled row if only the token with the greatest logit is needed.
    """

    sums: int
    token_bytes: int
    embedding: bool = False
    logits: int = 0
    best: int = 0


def rank_traffic(own: ModelSpec, itemsize: int, only_experts: bool = False) -> RankTraffic:
    """Return the amount of data that a rank exchanges in a step with the other ranks of its layers.

    Args:
        own: The spec of the rank's shard.
        itemsize: Bytes of an activation.
        only_experts: If True, only the experts are divided among these ranks, and each rank computes all other weights.
    """
    if only_experts:
        sums = sum(isinstance(layer.feed_forward, ExpertsSpec) for layer in own.layers)
        return RankTraffic(sums, own.hidden * itemsize)
    head = own.has_head
    first, end = own.tokens or (0, own.vocab)
    return RankTraffic(
        sums=sum(map(_sums, own.layers)),
        token_bytes=own.hidden * itemsize,
        embedding=own.begins,
        logits=LOGIT_BYTES * (end - first) if head else 0,
        best=ARGMAX_BYTES if head else 0,
    )


def _sums(layer: LayerSpec) -> int:
    fed = layer.feed_forward
    shared = isinstance(fed, ExpertsSpec) and fed.shared is not None
    return (layer.attention is not None) + 1 + shared
