"""The spec of a model: one description, from which shapes, names, memory, costs and operators are derived. No torch.

config.json ─▶ families/ ─▶ ModelSpec ─▶ parameters (shapes, dummy weights, what a checkpoint must hold)
                                     ├─▶ model_cost (what plan, report and step budgets count with)
                                     ├─▶ caches (memory of a block)
                                     └─▶ block, decoder (what runs), ops.fuse (a layer as one call)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.sampling import Pooling
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer_kernels.arithmetic import (
    SCALE_BYTES,
    Activation,
    CacheDtype,
    Dtype,
    KvCacheDtype,
    Quantization,
    WeightCodes,
    WeightForm,
)
from batchinfer_kernels.routing import Routing

HeadActivation = Activation | Literal["tanh", "relu"]  # of what classifies
BUCKETS = 32  # of distances of keys: MPNet's, whatever its configuration says
SHARED = "shared."  # begins the names of the products of shared experts


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of `width` values: RMSNorm, or LayerNorm, which may have a bias. Values are multiplied with `offset` and
    the weight added up: Gemma's weights are differences from 1. `heads`: so many stretches of `width` values are
    normed, each with a weight of its own."""

    width: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    biased: bool = False
    offset: float = 0.0
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weight."""
        return (self.width,) if self.heads is None else (self.heads, self.width)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix product. `parts` are the parameters that lie above one another in its weight, with their outputs;
    `biased` says whether each of them has a bias.

    `activation` follows it; where it is `gated`, the upper half of its outputs is the gate of the lower half. One that
    is `exact` is never quantised, and its results are float32. With `experts` the weight is that of all of them, one
    above the other, and a token multiplies those of `chosen` experts; 0: it belongs to none. With `heads` it has a part
    for each of so many, which queries and results of attention are multiplied with (LatentAttentionSpec). `form`: how
    its weight lies in memory; None: as values of the run's dtype.
    """

    name: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    biased: bool = False
    activation: Activation | None = None
    gated: bool = False
    exact: bool = False
    experts: int = 0
    chosen: int = 1
    heads: int = 0
    form: WeightForm | None = None

    @property
    def outputs(self) -> int:
        """How many values it gives for a token; where it has several experts, those of one."""
        return sum(outputs for _, outputs in self.parts) // max(1, self.experts)

    @property
    def stored(self) -> bool:
        """Whether its weight stays as the checkpoint stores it, quantised or without its zeros."""
        return self.form is not None and self.form.stored

    @property
    def stored_codes(self) -> bool:
        """Whether these are quantised values."""
        return self.form is not None and self.form.stored and self.form.coded

    @property
    def values(self) -> int:
        """Values of the weight, without the bias."""
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def active_values(self) -> int:
        """How many of its values a token is multiplied with."""
        return self.inputs * self.outputs * self.chosen


INT4_GROUP = 32  # inputs that share a scale where weights are rounded to int4


def form_of(linear: LinearSpec, codes: WeightCodes) -> WeightForm:
    """Return the form of a weight that is quantised to such codes; heads have int8 in place of int4."""
    if codes != "int4":
        return WeightForm(codes)
    return WeightForm("int8") if linear.heads else WeightForm("int4", "group", group=INT4_GROUP)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of a layer: K and V of each token, of `heads` heads of `dim` values. `window`: of how many tokens, the
    one that is run included; None: of all. Where it is `latent`, K and V are made of the same values, which are kept
    once. `shared`: the earlier layer whose K and V it reads; it keeps none itself. `dtype`: that of quantised values,
    which take a byte each, with a float32 scale for each head; None: values are kept in the run's dtype.
    """

    heads: int
    dim: int
    window: int | None = None
    latent: bool = False
    shared: int | None = None
    dtype: CacheDtype | None = None

    def head_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of `dim` values of a head, which take `itemsize` each where they are not quantised."""
        return dim * itemsize if self.dtype is None else dim + SCALE_BYTES

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes that a token takes in the cache."""
        return self.tensors * self.heads * self.head_bytes(self.dim, itemsize)

    @property
    def layout(self) -> tuple[object, ...]:
        """How a token lies in a block: layers of the same layout may take turns in one."""
        return self.heads, self.dim, self.latent, self.dtype

    @property
    def tensors(self) -> int:
        """Tensors that hold it."""
        if self.shared is not None:
            return 0
        return 1 if self.latent else 2


# Of each layer; None: it has no attention, and so no cache
Caches = Sequence[CacheSpec | None]


def own_caches(caches: Caches) -> dict[int, CacheSpec]:
    """The layers that keep K and V of their own."""
    return {layer: cache for layer, cache in enumerate(caches) if cache is not None and cache.shared is None}


def cache_mistakes(caches: Caches) -> Iterator[str]:
    """Why these are no caches of one model, a sentence each."""
    own = own_caches(caches)
    if not own:
        yield "no layer keeps K and V"
    for layer, cache in enumerate(caches):
        source = None if cache is None else cache.shared
        if cache is None or source is None:
            continue
        if source >= layer or source not in own:
            yield f"layer {layer} is to read the K and V of layer {source}, which keeps none before it"
        elif (cache.layout, cache.window) != (own[source].layout, own[source].window):
            yield f"layer {layer} is to read the K and V of layer {source}, whose heads, window or dtype are others"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a layer: of the first `dim` values of each head, or of none where `rope` is None. A pair
    is (i, i + dim / 2), or (2i, 2i + 1) where it is `interleaved`."""

    rope: RopeConfig | None
    dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The rules by which a layer's scores are masked and changed, and the codes of its cache; see AttentionSpec."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    codes: CacheDtype | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: q, k and v of the layer's input, rotated, and a projection back.

    `scale` multiplies scores; with a `soft_cap` they then become soft_cap * tanh(score / soft_cap). `window`: how many
    keys a query sees, its own included; None: all. `q_norm` and `k_norm` come before the rotation: of each head where
    they are as wide as a head, else of all heads together. With `sinks` each query head has a score without a value,
    which takes part in every softmax. `kv_layer`: the number of an earlier layer, with equal KV heads and the same
    window, whose K and V it reads (Brandon et al., 2024, "cross-layer attention"); it then makes none, and k_norm is
    that layer's. `cache_dtype` is the cache's (CacheSpec).
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotation: Rotation
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    kv_layer: int | None = None
    cache_dtype: CacheDtype | None = None

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rules(self) -> AttentionRules:
        return AttentionRules(self.window, self.soft_cap, self.sinks, self.cache_dtype)

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Whether all heads of q, and all of k, pass the same RMSNorm: the operator that rotates them knows it."""
        norm = self.q_norm
        return norm is not None and norm.shape == (self.head_dim,) and norm.kind == "rms"

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(
            self.kv_heads, self.head_dim, window=self.window, shared=self.kv_layer, dtype=self.cache_dtype
        )

    @property
    def first(self) -> str:
        """The name of the product that its input goes through."""
        return "qkv" if self.kv_layer is None else "q"

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Its products, in the order in which they run."""
        q, kv = ("q", self.q_width), (("k", self.kv_width), ("v", self.kv_width))
        return (
            LinearSpec(self.first, hidden, (q, *kv) if self.kv_layer is None else (q,), self.qkv_bias),
            LinearSpec("o", self.q_width, (("o", hidden),), self.o_bias),
        )

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """The norms of queries and keys by the name of their parameter."""
        return {"q_norm": self.q_norm} | ({"k_norm": self.k_norm} if self.kv_layer is None else {})


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2"): K and V of all heads are products of the same
    `rank` values of a token, its latent, which are normed. The cache keeps the latent, and beside it values of k that
    are rotated and that all heads share.

    A head of q and k has `plain_dim` values without a position, then rotated ones; one of v has `v_dim`. With a
    `q_rank` q is a product of that many values, which are normed. `eps` is of both norms.
    """

    q_heads: int
    rank: int
    plain_dim: int
    v_dim: int
    scale: float
    rotation: Rotation
    q_rank: int | None = None
    biased: bool = False
    eps: float = 1e-6
    window: None = None

    @property
    def kv_heads(self) -> int:
        """All query heads read the same values."""
        return 1

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads

    @property
    def q_dim(self) -> int:
        """Values of a head of q."""
        return self.plain_dim + self.rotation.dim

    @property
    def head_dim(self) -> int:
        """Values of a token that a query is multiplied with."""
        return self.rank + self.rotation.dim

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(1, self.head_dim, latent=True)

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Its products, in the order in which they run; `kv_b` has k and v of each head above one another."""
        width = self.q_heads * self.q_dim
        if self.q_rank is None:
            q = [LinearSpec("q", hidden, (("q", width),))]
        else:
            first = LinearSpec("q_a", hidden, (("q_a", self.q_rank),), self.biased)
            q = [first, LinearSpec("q_b", self.q_rank, (("q_b", width),))]
        made = self.q_heads * (self.plain_dim + self.v_dim)
        return (
            *q,
            LinearSpec("kv_a", hidden, (("kv_a", self.head_dim),), self.biased),
            LinearSpec("kv_b", self.rank, (("kv_b", made),), heads=self.q_heads),
            LinearSpec("o", self.q_heads * self.v_dim, (("o", hidden),), self.biased),
        )

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """The norms of the compressed queries and latents by the name of their parameter."""
        q = None if self.q_rank is None else NormSpec(self.q_rank, self.eps)
        return {"q_a_norm": q, "kv_a_norm": NormSpec(self.rank, self.eps)}


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)), `inner` values wide (Shazeer, 2020), or down(activation(up(x))) where it is
    not `gated`."""

    inner: int
    activation: Activation
    biased: bool = False
    gated: bool = True

    @property
    def first(self) -> str:
        """The name of the product that its input goes through."""
        return "gate_up" if self.gated else "up"

    def linears(self, hidden: int, start: str = "") -> tuple[LinearSpec, LinearSpec]:
        """Its products, in the order in which they run; `start` begins their names and those of their parts."""
        names = ("gate", "up") if self.gated else ("up",)
        into = tuple((start + name, self.inner) for name in names)
        return (
            LinearSpec(start + self.first, hidden, into, self.biased, self.activation, self.gated),
            LinearSpec(start + "down", self.inner, ((start + "down", hidden),), self.biased),
        )


@dataclass(frozen=True, slots=True)
class HeldExpert:
    """An expert that a rank has, as one of `copies` ranks: it computes those of the expert's tokens whose places in
    the step are `turn` modulo `copies`."""

    number: int
    turn: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Experts, each a gated feed-forward half that is `inner` values wide, of which a token uses those that `routing`
    chooses by the logits of a router; their weighted results are added up (Shazeer et al., 2017).

    `shared`: what all tokens pass beside them, added to the rest; where it is `shared_gated`, it is multiplied with the
    sigmoid of a number that is computed of each token. `held`: the experts that are there, in the order of their
    numbers, where other ranks have the others; None: all.
    """

    routing: Routing
    inner: int
    activation: Activation
    biased: bool = False
    router_biased: bool = False
    shared: FeedForwardSpec | None = None
    shared_gated: bool = False
    held: tuple[HeldExpert, ...] | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the experts that are there."""
        return tuple(range(self.routing.experts) if self.held is None else (one.number for one in self.held))

    @property
    def chosen(self) -> int:
        """How many of the experts that are there a token uses, about, and one at least."""
        each = len(self.numbers) if self.held is None else sum(1 / one.copies for one in self.held)
        return max(1, int(self.routing.chosen * each / self.routing.experts + 1e-9))

    def linears(self, hidden: int) -> Iterator[LinearSpec]:
        """Its products, in the order in which they run."""
        numbers, routed = self.numbers, self.routing.experts
        yield LinearSpec("router", hidden, (("router", routed),), self.router_biased, exact=True)
        into = tuple((f"expert.{e}.{name}", self.inner) for e in numbers for name in ("gate", "up"))
        first = LinearSpec("experts.gate_up", hidden, into, self.biased, self.activation, gated=True)
        yield replace(first, experts=len(numbers), chosen=self.chosen)
        back = tuple((f"expert.{e}.down", hidden) for e in numbers)
        second = LinearSpec("experts.down", self.inner, back, self.biased)
        yield replace(second, experts=len(numbers), chosen=self.chosen)
        if self.shared is not None:
            yield from self.shared.linears(hidden, SHARED)
        if self.shared_gated:
            yield LinearSpec("shared_gate", hidden, (("shared_gate", 1),), exact=True)

    @property
    def vectors(self) -> dict[str, int]:
        """Parameters that no product has, and their lengths."""
        return {"correction": self.routing.experts} if self.routing.corrected else {}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer: h += m * attention_norm(attention(input_norm(h))); then
    h += m * feed_forward_norm(feed_forward(post_norm(h))). A norm that is None is left out; m is `residual_multiplier`.
    Where it is `parallel`, both halves read the layer's input, through the same norm if there is no post_norm. Without
    an `attention` it is the feed-forward half alone, and has neither input_norm nor attention_norm. Where it
    `norms_sums`, it is h = attention_norm(h + attention(h)), then h = feed_forward_norm(h + feed_forward(h)), as in the
    first Transformers (Vaswani et al., 2017), and has no other norms. `forms`: those of its quantised weights, by the
    names of its products.
    """

    hidden: int
    input_norm: NormSpec | None
    attention: AttentionSpec | LatentAttentionSpec | None
    post_norm: NormSpec | None
    feed_forward: FeedForwardSpec | ExpertsSpec
    attention_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    residual_multiplier: float = 1.0
    parallel: bool = False
    norms_sums: bool = False
    forms: tuple[tuple[str, WeightForm], ...] = ()

    def __post_init__(self) -> None:
        halved = self.input_norm is None and self.attention_norm is None and not self.parallel
        if self.attention is None and not halved:
            raise ValueError("a layer without attention has no norm of it, and no half beside it")
        both = self.attention_norm is not None and self.feed_forward_norm is not None
        alone = self.input_norm is None and self.post_norm is None and self.residual_multiplier == 1
        if self.norms_sums and not (both and alone and not self.parallel):
            raise ValueError("a layer that norms sums has a norm behind each half, and none before")

    @property
    def rotation(self) -> Rotation | None:
        """None: it has no attention."""
        return None if self.attention is None else self.attention.rotation

    @property
    def cache(self) -> CacheSpec | None:
        """None: it keeps nothing, and reads nothing that another keeps."""
        return None if self.attention is None else self.attention.cache

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its matrix products, in the order in which they run."""
        attending = () if self.attention is None else self.attention.linears(self.hidden)
        found, forms = (*attending, *self.feed_forward.linears(self.hidden)), dict(self.forms)
        return tuple(replace(each, form=forms.get(each.name)) for each in found) if forms else found

    def quantized(self, codes: WeightCodes) -> LayerSpec:
        """Return the layer with all weights quantised to such codes that may be, and are not yet."""
        forms = ((each.name, each.form or form_of(each, codes)) for each in self.linears if not each.exact)
        return replace(self, forms=tuple(forms))

    @property
    def vectors(self) -> dict[str, int]:
        """Parameters that belong to neither a product nor a norm, and their lengths. They are float32."""
        attention = self.attention
        of_experts = self.feed_forward.vectors if isinstance(self.feed_forward, ExpertsSpec) else {}
        if isinstance(attention, AttentionSpec) and attention.sinks:
            return {"sinks": attention.q_heads, **of_experts}
        return of_experts

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The layer's norms by the name of their parameter."""
        found = {
            "input_norm": self.input_norm,
            "attention_norm": self.attention_norm,
            "post_norm": self.post_norm,
            "feed_forward_norm": self.feed_forward_norm,
            **({} if self.attention is None else self.attention.norms),
        }
        return {name: norm for name, norm in found.items() if norm is not None}


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """A classification head, which makes `labels` logits of a prompt's pooled states: out(norm(activation(dense(x)))),
    without the norm where it is None. `biased`: whether dense has a bias; out always has one."""

    labels: int
    activation: HeadActivation
    pooling: Pooling = "cls"
    biased: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder: its tokens see one another, also later ones, and no token follows, so that it has no head that makes
    logits of tokens; it may have a `classifier`. A window of its attention is on both sides: a query sees the keys of
    which it is less than that many positions apart.

    `embedding_norm` norms embeddings, once those of positions and types are added. With `token_types` each token has
    one of so many types. `first_position`: the row of the first token in the table of learned positions. With
    `distance_buckets` each query head adds a learned number to a score, by the distance of query and key (MPNet; see
    models/decoder/positions.py).
    """

    embedding_norm: NormSpec | None = None
    token_types: int = 0
    first_position: int = 0
    distance_buckets: int = 0
    classifier: ClassifierSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: an embedding, layers, a norm, and a head that makes logits; or an `encoder`, without the head. Sizes
    are counts of values.

    Embeddings and logits are multiplied with their multipliers, that of embeddings rounded to the run's dtype. With
    `learned_positions` an embedding of the position is added; with a `logit_cap` logits become cap * tanh(logit / cap).

    Of a model that several ranks compute: `begins`, the embedding is here, and not at a rank with earlier layers;
    `ends`: the last norm and the head are; `tokens`: those whose rows embedding and head have, from the first to before
    the second; None: all.
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    tied: bool  # the head is the embedding, unless the checkpoint brings a different one
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: Dtype | None  # as config.json states it
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    learned_positions: bool = False
    encoder: EncoderSpec | None = None
    head_form: WeightForm | None = None
    begins: bool = True
    ends: bool = True
    tokens: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """How many rows embedding and head have."""
        return self.vocab if self.tokens is None else self.tokens[1] - self.tokens[0]

    @property
    def has_head(self) -> bool:
        """Whether it makes logits of tokens."""
        return self.causal and self.ends

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it alone, so that a prompt can be read in parts, and continued."""
        return self.encoder is None

    @property
    def classifier(self) -> ClassifierSpec | None:
        """Return the classification head; None: it has none."""
        return None if self.encoder is None else self.encoder.classifier

    def without_classifier(self) -> ModelSpec:
        """Return the model without its classification head."""
        encoder = self.encoder
        return self if encoder is None else replace(self, encoder=replace(encoder, classifier=None))

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec:
        """Return the attention of the first layer that has one, whose heads and sizes all layers share."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def caches(self) -> Caches:
        """Return the cache of each layer; None for a layer without attention."""
        return tuple(layer.cache for layer in self.layers)

    def with_cache_dtype(self, kept: KvCacheDtype) -> ModelSpec:
        """Return the model with a cache of this dtype; auto: as it is. Latents stay as they are."""
        if kept == "auto":
            return self
        layers = (
            replace(layer, attention=replace(layer.attention, cache_dtype=kept))
            if isinstance(layer.attention, AttentionSpec)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def quantized(self, quantization: Quantization) -> ModelSpec:
        """Return the model with weights that are quantised so when they are loaded, where the checkpoint does not hold
        them quantised; none, stored: as it is."""
        if quantization not in ("int4", "int8", "fp8"):
            return self
        layers = tuple(layer.quantized(quantization) for layer in self.layers)
        # the head in int8 at least: its logits decide
        return replace(self, layers=layers, head_form=WeightForm("fp8" if quantization == "fp8" else "int8"))

    @property
    def forms(self) -> frozenset[WeightForm]:
        """Return the forms in which its quantised weights lie."""
        linears = (*self.linears(), *([self.head] if self.has_head else []))
        return frozenset(linear.form for linear in linears if linear.form is not None)

    @property
    def long_rope_beyond(self) -> int | None:
        """Sequences that may become longer are rotated in another way; None: there is but one."""
        rope = self.attention.rotation.rope
        return rope.original_max_positions if rope is not None and rope.kind == "longrope" else None

    def content_roots(self, max_model_len: int) -> ContentRoots:
        """Return the content roots of requests that may be this long."""
        return ContentRoots(max_model_len, self.long_rope_beyond)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that has attention; None: it sees all tokens."""
        return tuple(cache.window for cache in self.caches if cache is not None)

    @property
    def head(self) -> LinearSpec:
        return LinearSpec("lm_head", self.hidden, (("head", self.rows),), form=self.head_form)

    def linears(self) -> Iterator[LinearSpec]:
        """Yield the linear layers of all layers, without the head."""
        for layer in self.layers:
            yield from layer.linears
