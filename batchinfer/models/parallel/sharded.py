"""The spec of the part of a model that a rank has, and the bytes that it sends other ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.place import EVERYTHING, Portion, RankPlace, Span
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

FP8_BLOCK = 128  # outputs, and inputs, that share a scale where blocks do
GROUP_UNIT = 8  # of which an int4 group's inputs are a multiple
MOST_RANKS = 64  # that are tried for a message
LOGIT_BYTES = 4  # of a logit
BEST_BYTES = 16  # of a row's greatest logit and its token, both of which are sent as float64


def sharded(spec: ModelSpec, place: RankPlace) -> ModelSpec:
    """Return the spec of a rank's part. Raises CannotSplit where the model cannot be divided so, with the sizes that
    can."""
    if place.whole:
        return spec
    _check_model(spec, place)
    try:
        layers = tuple(_layer(layer, place, index) for index, layer in enumerate(spec.layers))
    except CannotSplit as error:
        raise CannotSplit(f"{error}; {_told_sizes(spec, place)}") from None
    found = replace(spec, layers=layers)
    if not place.tensor.whole:
        found = replace(found, tokens=place.tensor.span(spec.vocab))
    return found if place.layers is None else _stage(found, place.layers)


def tensor_sizes(spec: ModelSpec, place: RankPlace = EVERYTHING) -> list[int]:
    """Return the numbers of ranks that each of its layers can be divided among; ranks have whole experts where each
    gets as many."""
    evenly = expert_sizes(spec)
    every = (Portion(0, size) for size in range(1, MOST_RANKS + 1))
    ranges = replace(place, placement=None)
    places = (replace(ranges, tensor=one, experts=one if one.size in evenly else None) for one in every)
    return [each.tensor.size for each in places if _divides(spec, each)]


def expert_sizes(spec: ModelSpec) -> list[int]:
    """Return the numbers of ranks that the experts of each layer can be divided among, as many to each; none for a
    model without experts."""
    counts = {len(fed.numbers) for layer in spec.layers if isinstance(fed := layer.feed_forward, ExpertsSpec)}
    return [
        size for size in range(1, MOST_RANKS + 1) if counts and all(count % size == 0 for count in counts)
    ]


def _divides(spec: ModelSpec, place: RankPlace) -> bool:
    try:
        for layer in set(spec.layers):
            _layer(layer, place, 0)
    except CannotSplit:
        return False
    return True


def _told_sizes(spec: ModelSpec, place: RankPlace) -> str:
    sizes = ", ".join(map(str, tensor_sizes(spec, place)))
    return f"its tensors can be divided among {sizes or 'no ranks'}"


def _check_model(spec: ModelSpec, place: RankPlace) -> None:
    if spec.encoder is not None:
        raise CannotSplit(f"{spec.family} is an encoder, which one rank computes alone")
    divided = place.experts is not None and not place.experts.whole
    if divided and not any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers):
        raise CannotSplit(f"{spec.family} has no experts that ranks could divide")
    if not place.tensor.whole and spec.vocab < place.tensor.size:
        raise CannotSplit(
            f"a vocabulary of {spec.vocab} tokens has no part for each of {place.tensor.size} ranks"
        )
    if place.layers is None:
        return
    first, end = place.layers
    if not 0 <= first < end <= len(spec.layers):
        raise CannotSplit(f"there are no layers {first} to {end - 1}; {spec.family} has {len(spec.layers)}")
    if all(layer.attention is None for layer in spec.layers[first:end]):
        raise CannotSplit(
            f"layers {first} to {end - 1} have no attention; a stage needs a layer that has one"
        )


def _stage(spec: ModelSpec, layers: Span) -> ModelSpec:
    """Return the spec of some of the layers, with what is before the first and behind the last one."""
    first, end = layers
    own = tuple(_renumbered(layer, first) for layer in spec.layers[first:end])
    return replace(spec, layers=own, begins=spec.begins and first == 0, ends=end == len(spec.layers))


def _renumbered(layer: LayerSpec, first: int) -> LayerSpec:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.kv_layer is None:
        return layer
    if attention.kv_layer < first:
        raise CannotSplit(
            f"a stage that begins with layer {first} has a layer that reads the K and V of layer {attention.kv_layer}"
        )
    return replace(layer, attention=replace(attention, kv_layer=attention.kv_layer - first))


def _layer(layer: LayerSpec, place: RankPlace, index: int) -> LayerSpec:
    fed = layer.feed_forward
    found = replace(
        layer,
        attention=_attention(layer.attention, place.tensor),
        feed_forward=_experts(fed, place, index)
        if isinstance(fed, ExpertsSpec)
        else _columns(fed, place.tensor),
    )
    pairs = [*zip(layer.linears, found.linears, strict=True)]
    for whole, own in pairs:
        _check_form(whole, own)
    forms = ((own.name, _own_form(whole, own)) for whole, own in pairs)
    return replace(found, forms=tuple((name, form) for name, form in forms if form is not None))


def _attention(
    spec: AttentionSpec | LatentAttentionSpec | None, share: Portion
) -> AttentionSpec | LatentAttentionSpec | None:
    if spec is None or share.whole:
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


def _experts(spec: ExpertsSpec, place: RankPlace, index: int) -> ExpertsSpec:
    shared = None if spec.shared is None else _columns(spec.shared, place.tensor)
    if place.experts is None:
        return replace(spec, inner=_part(spec.inner, place.tensor, "columns of an expert"), shared=shared)
    count = spec.routing.experts
    if count < place.experts.size:
        raise CannotSplit(f"{count} experts have no part for each of {place.experts.size} ranks")
    return replace(spec, held=_held(count, place.experts, place.placement, index), shared=shared)


def _held(
    count: int, share: Portion, placement: ExpertPlacement | None, layer: int
) -> tuple[HeldExpert, ...] | None:
    """Return what a rank has of `count` experts of a layer of the whole model; None: all."""
    if share.whole:
        return None
    if placement is not None:
        return placement.held(layer, share.rank)
    return tuple(map(HeldExpert, range(*share.span(count))))


def _part(count: int, share: Portion, what: str) -> int:
    if count % share.size:
        raise CannotSplit(f"{count} {what} cannot be divided among {share.size} ranks")
    return count // share.size


def _own_form(whole: LinearSpec, own: LinearSpec) -> WeightForm | None:
    """Return the form of a rank's part of a weight: a group of all inputs is one of all that are left."""
    form = whole.form
    one = form is not None and form.group == whole.inputs
    return replace(form, group=own.inputs) if form is not None and one else form


def _check_form(whole: LinearSpec, own: LinearSpec) -> None:
    """Raises CannotSplit where scales of quantised values would lie across a border between ranks."""
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
    """The values that ranks with the same layers send each other, in bytes of a token: `sums` times in a step the
    hidden states of all tokens are added up, and once, where there is an `embedding`, their embeddings. Of each row
    that is sampled every rank sends `logits` bytes where logits are asked for, or the best of them: `best` bytes."""

    sums: int
    token_bytes: int  # of a token's hidden state, which the next stage gets, too
    embedding: bool = False
    logits: int = 0
    best: int = 0


def rank_traffic(own: ModelSpec, itemsize: int, experts_alone: bool = False) -> RankTraffic:
    """Return the traffic of a rank with this part of a model. `itemsize`: bytes of an activation; `experts_alone`:
    nothing but its experts is divided among ranks with the same layers."""
    if experts_alone:
        sums = sum(isinstance(layer.feed_forward, ExpertsSpec) for layer in own.layers)
        return RankTraffic(sums, own.hidden * itemsize)
    head = own.has_head
    first, end = own.tokens or (0, own.vocab)
    return RankTraffic(
        sums=sum(map(_sums, own.layers)),
        token_bytes=own.hidden * itemsize,
        embedding=own.begins,
        logits=LOGIT_BYTES * (end - first) if head else 0,
        best=BEST_BYTES if head else 0,
    )


def _sums(layer: LayerSpec) -> int:
    """Count the sums over ranks in a layer: behind attention, behind the feed-forward half or experts, and behind the
    shared experts, where there are any."""
    fed = layer.feed_forward
    shared = isinstance(fed, ExpertsSpec) and fed.shared is not None
    return (layer.attention is not None) + 1 + shared
