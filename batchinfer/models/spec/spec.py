"""The spec of a model, from which shapes, names, memory, costs and operators are derived. No torch.

config.json ─▶ families/ ─▶ ModelSpec ─▶ parameters (shapes, dummy weights, expected tensors of a checkpoint)
                                     ├─▶ model_cost (used by plan, report and step budgets)
                                     ├─▶ caches (memory of a block)
                                     └─▶ block, decoder (the operators), ops.fuse (a layer as one call)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

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

HeadActivation = Activation | Literal["tanh", "relu"]  # of a classification head
BUCKETS = 32  # distance buckets of MPNet, which ignores the number in its configuration
SHARED = "shared."  # prefix of the products of shared experts


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm or LayerNorm.

    Args:
        width: The number of values that are normed together.
        eps: The epsilon.
        kind: "rms" or "layer".
        biased: True if the norm has a bias.
        offset: Is added to the weights, as Gemma's weights are differences from 1.
        heads: If set, the input consists of this number of heads with `width` values, and each head has its own
            weights.
    """

    width: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    biased: bool = False
    offset: float = 0.0
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the norm's weight: (width,), or (heads, width)."""
        return (self.width,) if self.heads is None else (self.heads, self.width)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix product of a layer, such as "qkv".

    Args:
        name: The name of the product.
        inputs: Number of inputs per token.
        parts: The name and number of outputs of each parameter that is concatenated in the weight, such as "q".
        biased: True if each part has a bias.
        activation: The activation of the results. None: there is none.
        gated: If True, the first half of the outputs is the gate of the second half.
        exact: If True, the weight is never quantised, and the results are float32, as for a router.
        experts: The number of experts whose weights are concatenated; 0 if the product does not belong to experts.
        chosen: The number of experts that compute a token.
        heads: The number of heads, if the weight computes K and V from latents, head by head. 0: it does not.
        form: How the weight is quantised or sparse in memory. None: it is in the dtype of the run.
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
        """Return the number of outputs per token.

        If the product belongs to experts, it is the number of a single expert.
        """
        return sum(outputs for _, outputs in self.parts) // max(1, self.experts)

    @property
    def stored(self) -> bool:
        """Return True if memory holds the weight in the quantised or 2:4 sparse form of the checkpoint."""
        return self.form is not None and self.form.stored

    @property
    def stored_codes(self) -> bool:
        """Return True if memory holds the quantised values of the checkpoint."""
        return self.form is not None and self.form.stored and self.form.coded

    @property
    def values(self) -> int:
        """Return the number of values of the weight, without the bias.

        If the product belongs to experts, all are counted.
        """
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def active_values(self) -> int:
        """Return the number of weight values that are used per token. Experts that are not chosen do not count."""
        return self.inputs * self.outputs * self.chosen


INT4_GROUP = 32  # inputs that share a scale when this program quantises weights to int4


def form_of(linear: LinearSpec, codes: WeightCodes) -> WeightForm:
    """Return the form of a weight that is quantised on loading.

    Args:
        linear: The matrix product of the weight.
        codes: The type of the quantised values.
    """
    if codes != "int4":
        return WeightForm(codes)
    return WeightForm("int8") if linear.heads else WeightForm("int4", "group", group=INT4_GROUP)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The sizes of a layer's KV cache.

    Args:
        heads: The number of KV heads.
        dim: The number of values of K, and of V, per head.
        window: The number of keys that a query attends to, its own included. None: all.
        latent: If True, the cache stores latents, from which both K and V are computed, in one tensor.
        shared: The earlier layer whose K and V this layer reads; this layer then stores none. None: it stores its own.
        dtype: The dtype of quantised values: one byte each, and a float32 scale per head. None: the dtype of the run.
    """

    heads: int
    dim: int
    window: int | None = None
    latent: bool = False
    shared: int | None = None
    dtype: CacheDtype | None = None

    def head_bytes(self, dim: int, itemsize: int) -> int:
        """Return the bytes of one head of one token in the cache, its scale included.

        Args:
            dim: The number of values of the head.
            itemsize: Bytes of a value that is not quantised.
        """
        return dim * itemsize if self.dtype is None else dim + SCALE_BYTES

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token in the cache, with `itemsize` bytes per value that is not quantised."""
        return self.tensors * self.heads * self.head_bytes(self.dim, itemsize)

    @property
    def layout(self) -> tuple[object, ...]:
        """Return the layout of a token in the cache. Layers with equal layouts can share blocks."""
        return self.heads, self.dim, self.latent, self.dtype

    @property
    def tensors(self) -> int:
        """Return the number of tensors that store the cache: K and V, one for latents, or none for a shared cache."""
        if self.shared is not None:
            return 0
        return 1 if self.latent else 2


# One per layer; None for a layer without attention
Caches = Sequence[CacheSpec | None]


def own_caches(caches: Caches) -> dict[int, CacheSpec]:
    """Return the caches of the layers that store K and V themselves, by number of the layer."""
    return {layer: cache for layer, cache in enumerate(caches) if cache is not None and cache.shared is None}


def cache_mistakes(caches: Caches) -> Iterator[str]:
    """Yield an error message for each contradiction between the KV caches of a model's layers.

    Args:
        caches: The cache of each layer; None for a layer without attention.
    """
    own = own_caches(caches)
    if not own:
        yield "no layer keeps K and V"
    for layer, cache in enumerate(caches):
        source = None if cache is None else cache.shared
        if cache is None or source is None:
            continue
        if source >= layer or source not in own:
            yield f"layer {layer} reads the K and V of layer {source}, which is no earlier layer with K and V"
        elif (cache.layout, cache.window) != (own[source].layout, own[source].window):
            yield f"layer {layer} reads the K and V of layer {source}, whose heads, window or dtype differ"


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a layer.

    Args:
        rope: The parameters of the angles. None: nothing is rotated.
        dim: The number of rotated values of a head. They are its first values.
        interleaved: If True, values 2i and 2i + 1 are rotated as a pair. Otherwise, values i and i + dim / 2 are.
    """

    rope: RopeConfig | None
    dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The properties of a layer's attention by which its kernels are chosen.

    Args:
        window: The number of keys that a query attends to, its own included. None: all.
        soft_cap: If set, scores become soft_cap * tanh(score / soft_cap).
        sinks: If True, the softmax of each query head includes one more score, which has no value.
        codes: The dtype of the quantised KV cache. None: it is not quantised.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    codes: CacheDtype | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention with rotary embeddings and an output projection.

    Args:
        q_heads: The number of query heads.
        kv_heads: The number of KV heads.
        head_dim: The head size.
        scale: The factor of scores.
        rotation: The rotary embedding of q and k.
        window: The number of keys that a query attends to, its own included. None: all.
        soft_cap: If set, scores become soft_cap * tanh(score / soft_cap).
        sinks: If True, the softmax of each query head includes one more score, which has no value.
        q_norm: The norm of q before the rotation. If it is as wide as a head, each head is normed, and otherwise all
            heads together. None: there is none.
        k_norm: The norm of k before the rotation. None: there is none.
        qkv_bias: True if q, k and v have biases.
        o_bias: True if the output projection has a bias.
        kv_layer: An earlier layer whose K and V this layer reads (Brandon et al., 2024, "cross-layer attention"). Both
            have equal KV heads and windows, and the earlier layer norms k. None: the layer has its own K and V.
        cache_dtype: The dtype of the quantised KV cache. None: the dtype of the run.
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
        """Return the number of query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rules(self) -> AttentionRules:
        """Return the properties of this attention by which its kernels are chosen."""
        return AttentionRules(self.window, self.soft_cap, self.sinks, self.cache_dtype)

    @property
    def q_width(self) -> int:
        """Return the number of values of q per token: query heads × head size."""
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the number of values of k, and of v, per token: KV heads × head size."""
        return self.kv_heads * self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Return True if each head of q and k is normed by an RMSNorm, which the operator of the rotation computes."""
        norm = self.q_norm
        return norm is not None and norm.shape == (self.head_dim,) and norm.kind == "rms"

    @property
    def cache(self) -> CacheSpec:
        """Return the sizes of the layer's KV cache."""
        return CacheSpec(
            self.kv_heads, self.head_dim, window=self.window, shared=self.kv_layer, dtype=self.cache_dtype
        )

    @property
    def first(self) -> str:
        """Return the name of the matrix product that reads the layer's input: "qkv"; or "q" if `kv_layer` is set."""
        return "qkv" if self.kv_layer is None else "q"

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Return the matrix products of attention in the order of their computation.

        Args:
            hidden: The size of a hidden state.
        """
        q, kv = ("q", self.q_width), (("k", self.kv_width), ("v", self.kv_width))
        return (
            LinearSpec(self.first, hidden, (q, *kv) if self.kv_layer is None else (q,), self.qkv_bias),
            LinearSpec("o", self.q_width, (("o", hidden),), self.o_bias),
        )

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """Return the norms of q and k by name; None for a norm that the layer does not have.

        The norm of k is left out if the layer reads another layer's K and V.
        """
        return {"q_norm": self.q_norm} | ({"k_norm": self.k_norm} if self.kv_layer is None else {})


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2").

    K and V of all heads are computed from one normed vector per token, the latent. The cache stores the latent and the
    rotated values of k, which all heads share.

    Args:
        q_heads: The number of query heads.
        rank: The number of values of a latent.
        plain_dim: The number of values of a head of q and k that are not rotated. The rotated values follow them.
        v_dim: The number of values of a head of v.
        scale: The factor of scores.
        rotation: The rotary embedding.
        q_rank: If set, q is computed from a normed vector with this number of values. None: q is computed from the
            hidden state.
        biased: True if the products q_a, kv_a and o have biases.
        eps: The epsilon of the norms of latents and of compressed queries.
        window: Always None: a query attends to all keys.
        kv_heads: Always 1: all query heads read the same cached values.
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

    kv_heads: ClassVar[int] = 1

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head. As there is one KV head, it is the number of query heads."""
        return self.q_heads

    @property
    def q_dim(self) -> int:
        """Return the number of values of a head of q: unrotated and rotated ones."""
        return self.plain_dim + self.rotation.dim

    @property
    def head_dim(self) -> int:
        """Return the number of cached values per token: the latent and the rotated values of k."""
        return self.rank + self.rotation.dim

    @property
    def cache(self) -> CacheSpec:
        """Return the sizes of the layer's cache, which stores latents."""
        return CacheSpec(1, self.head_dim, latent=True)

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Return the matrix products of attention in the order of their computation.

        Args:
            hidden: The size of a hidden state.
        """
        # In the outputs of kv_b, k and v of each head are adjacent
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
        """Return the norms of compressed queries (None if queries are not compressed) and of latents, by name."""
        q = None if self.q_rank is None else NormSpec(self.q_rank, self.eps)
        return {"q_a_norm": q, "kv_a_norm": NormSpec(self.rank, self.eps)}


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """A dense feed-forward half of a layer.

    It computes down(activation(gate(x)) * up(x)) (Shazeer, 2020) or, if not `gated`, down(activation(up(x))).

    Args:
        inner: The number of intermediate values.
        activation: The activation.
        biased: True if all products have biases.
        gated: True if there is a gate.
    """

    inner: int
    activation: Activation
    biased: bool = False
    gated: bool = True

    @property
    def first(self) -> str:
        """Return the name of the matrix product that reads the input: "gate_up", or "up" without a gate."""
        return "gate_up" if self.gated else "up"

    def linears(self, hidden: int, start: str = "") -> tuple[LinearSpec, LinearSpec]:
        """Return the matrix products of the feed-forward half in the order of their computation.

        Args:
            hidden: The size of a hidden state.
            start: A prefix for the names of the products and their parts.
        """
        names = ("gate", "up") if self.gated else ("up",)
        into = tuple((start + name, self.inner) for name in names)
        return (
            LinearSpec(start + self.first, hidden, into, self.biased, self.activation, self.gated),
            LinearSpec(start + "down", self.inner, ((start + "down", hidden),), self.biased),
        )


@dataclass(frozen=True, slots=True)
class HeldExpert:
    """An expert that a rank holds. Several ranks may hold the same expert.

    Args:
        number: The index of the expert in the layer.
        turn: The rank's turn among the ranks that hold the expert. It computes the tokens of the expert whose position
            in the step is `turn` modulo `copies`.
        copies: The number of ranks that hold the expert.
    """

    number: int
    turn: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al., 2017): gated feed-forward halves, a few of them per token.

    A router computes a logit per expert, some experts are chosen by these logits, and their weighted results are added
    up.

    Args:
        routing: The rule by which experts are chosen for a token.
        inner: The number of intermediate values of an expert.
        activation: The activation of an expert.
        biased: True if the products of experts have biases.
        router_biased: True if the router has a bias.
        shared: A feed-forward half that all tokens use. Its results are added to the results of experts. None: there is
            none.
        shared_gated: If True, the results of `shared` are multiplied by a sigmoid gate, one value per token.
        held: The experts of this rank in ascending order. None: all.
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
        """Return the indices of the experts that this rank holds, ascending."""
        return tuple(range(self.routing.experts) if self.held is None else (one.number for one in self.held))

    @property
    def chosen(self) -> int:
        """Return the mean number of this rank's experts that compute a token, rounded down, but at least 1."""
        each = len(self.numbers) if self.held is None else sum(1 / one.copies for one in self.held)
        return max(1, int(self.routing.chosen * each / self.routing.experts + 1e-9))

    def linears(self, hidden: int) -> Iterator[LinearSpec]:
        """Yield the matrix products of router and experts in the order of their computation.

        Args:
            hidden: The size of a hidden state.
        """
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
        """Return the length of each parameter that is a vector, by name: the router's "correction", if it has one."""
        return {"correction": self.routing.experts} if self.routing.corrected else {}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer.

    It computes h += m * attention_norm(attention(input_norm(h))), then h += m *
    feed_forward_norm(feed_forward(post_norm(h))), with m = `residual_multiplier`. Norms that are None are skipped.

    Args:
        hidden: The size of a hidden state.
        input_norm: The norm before attention.
        attention: The attention. None: the layer consists of the feed-forward half, and has neither input_norm nor
            attention_norm.
        post_norm: The norm before the feed-forward half.
        feed_forward: The feed-forward half.
        attention_norm: The norm after attention.
        feed_forward_norm: The norm after the feed-forward half.
        residual_multiplier: The factor m of the results of attention and feed-forward half.
        parallel: If True, the feed-forward half reads h from before attention. Without a post_norm, both halves use
            input_norm.
        norms_sums: If True, the layer is h = attention_norm(h + attention(h)), then h = feed_forward_norm(h +
            feed_forward(h)), as in the first Transformer (Vaswani et al., 2017), and has no other norms.
        forms: The forms of weights that are quantised or stay sparse, by name of the product.
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
            raise ValueError("a layer without attention has no attention norms and is not parallel")
        both = self.attention_norm is not None and self.feed_forward_norm is not None
        alone = self.input_norm is None and self.post_norm is None and self.residual_multiplier == 1
        if self.norms_sums and not (both and alone and not self.parallel):
            raise ValueError("a layer that norms sums has a norm after each half, and none before")

    @property
    def rotation(self) -> Rotation | None:
        """Return the rotary embedding; None without attention."""
        return None if self.attention is None else self.attention.rotation

    @property
    def cache(self) -> CacheSpec | None:
        """Return the sizes of the KV cache that the layer writes or reads; None without attention."""
        return None if self.attention is None else self.attention.cache

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return the matrix products of the layer in the order of their computation."""
        attending = () if self.attention is None else self.attention.linears(self.hidden)
        found, forms = (*attending, *self.feed_forward.linears(self.hidden)), dict(self.forms)
        return tuple(replace(each, form=forms.get(each.name)) for each in found) if forms else found

    def quantized(self, codes: WeightCodes) -> LayerSpec:
        """Return a copy of the layer whose weights are quantised on loading.

        Weights that must not be quantised, and weights that already have a quantised or sparse form, are unchanged.

        Args:
            codes: The type of the quantised values.
        """
        forms = ((each.name, each.form or form_of(each, codes)) for each in self.linears if not each.exact)
        return replace(self, forms=tuple(forms))

    @property
    def vectors(self) -> dict[str, int]:
        """Return the length of each parameter that is a float32 vector, by name, such as attention sinks."""
        attention = self.attention
        of_experts = self.feed_forward.vectors if isinstance(self.feed_forward, ExpertsSpec) else {}
        if isinstance(attention, AttentionSpec) and attention.sinks:
            return {"sinks": attention.q_heads, **of_experts}
        return of_experts

    @property
    def norms(self) -> dict[str, NormSpec]:
        """Return the norms that the layer has, by name."""
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
    """A classification head of an encoder. It computes out(norm(activation(dense(x)))) from pooled hidden states x.

    Args:
        labels: The number of labels, which is the number of logits per text.
        activation: The activation after the linear layer `dense`.
        pooling: How the hidden states of a text are pooled.
        biased: True if `dense` has a bias. The linear layer `out` always has one.
        norm: The norm before `out`. None: there is none.
    """

    labels: int
    activation: HeadActivation
    pooling: Pooling = "cls"
    biased: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The properties of an encoder, which generates no tokens. Its tokens also attend to later tokens.

    A sliding window extends to both sides: a query attends to keys at a distance of less than the window.

    Args:
        embedding_norm: The norm of the sum of the embeddings of token, position and type.
        token_types: The number of token types. 0: there is no embedding of token types.
        first_position: The row of the table of learned positions that belongs to the first token.
        distance_buckets: The number of learned biases of attention scores, one per range of distances between query and
            key (MPNet). 0: there is no such bias.
        classifier: The classification head. None: there is none.
    """

    embedding_norm: NormSpec | None = None
    token_types: int = 0
    first_position: int = 0
    distance_buckets: int = 0
    classifier: ClassifierSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The structure and sizes of a model, which is a decoder or an encoder, or of a rank's shard of a model.

    Args:
        family: The `model_type` of its family.
        hidden: The size of a hidden state.
        vocab: The number of tokens in the vocabulary.
        layers: The layers.
        final_norm: The norm after the last layer. None: there is none.
        tied: If True, the output layer (lm_head) uses the weight of the embedding, unless the checkpoint stores a
            different one.
        max_positions: The maximum length of a sequence in tokens.
        eos_token_ids: The tokens that end a sequence.
        bos_token_id: The token at the start of a sequence. None: config.json does not state it.
        dtype: The dtype that config.json states. None: it states none, or one that is not supported.
        embedding_multiplier: The factor of embeddings, rounded to the dtype of the run.
        logit_multiplier: The factor of logits.
        logit_cap: If set, logits become logit_cap * tanh(logit / logit_cap).
        learned_positions: If True, a learned embedding of the position is added to the embedding of a token.
        encoder: The properties of an encoder. None: the model is a decoder.
        head_form: The form of the output layer if it is quantised. None: it is in the dtype of the run.
        begins: True if this shard has the embedding.
        ends: True if this shard has the final norm and the output layer.
        tokens: The range of token ids whose rows of the embedding and the output layer this shard has, (first, end).
            None: all.
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: Dtype | None
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
        """Return the number of rows of embedding and output layer: the vocabulary, or the shard's part of it."""
        return self.vocab if self.tokens is None else self.tokens[1] - self.tokens[0]

    @property
    def has_head(self) -> bool:
        """Return True if the model computes logits of tokens: it is a decoder, and has the output layer."""
        return self.causal and self.ends

    @property
    def causal(self) -> bool:
        """Return True for a decoder: tokens attend to earlier tokens only, so prompts can be chunked and continued."""
        return self.encoder is None

    @property
    def classifier(self) -> ClassifierSpec | None:
        """Return the classification head; None if there is none."""
        return None if self.encoder is None else self.encoder.classifier

    def without_classifier(self) -> ModelSpec:
        """Return a copy of the model without its classification head. A model without one is returned unchanged."""
        encoder = self.encoder
        return self if encoder is None else replace(self, encoder=replace(encoder, classifier=None))

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec:
        """Return the attention of the first layer that has one. All layers have the same heads and sizes."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def caches(self) -> Caches:
        """Return the sizes of each layer's KV cache; None for a layer without attention."""
        return tuple(layer.cache for layer in self.layers)

    def with_cache_dtype(self, kept: KvCacheDtype) -> ModelSpec:
        """Return a copy of the model with another dtype of the KV cache.

        Args:
            kept: The dtype. "auto" changes nothing. Caches of latents keep their dtype.
        """
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
        """Return a copy of the model whose weights, the output layer included, are quantised on loading.

        Weights that already have a quantised or sparse form are unchanged. For int4, the output layer gets int8.

        Args:
            quantization: "int4", "int8" or "fp8". Other values change nothing.
        """
        if quantization not in ("int4", "int8", "fp8"):
            return self
        layers = tuple(layer.quantized(quantization) for layer in self.layers)
        # The head is never quantised to int4: errors of logits change tokens directly
        return replace(self, layers=layers, head_form=WeightForm("fp8" if quantization == "fp8" else "int8"))

    @property
    def forms(self) -> frozenset[WeightForm]:
        """Return the distinct forms of the model's quantised or sparse weights, the output layer included."""
        linears = (*self.linears(), *([self.head] if self.has_head else []))
        return frozenset(linear.form for linear in linears if linear.form is not None)

    @property
    def long_rope_beyond(self) -> int | None:
        """Return the number of tokens beyond which sequences use LongRoPE's angles for long sequences.

        Returns None without LongRoPE.
        """
        rope = self.attention.rotation.rope
        return rope.original_max_positions if rope is not None and rope.kind == "longrope" else None

    def content_roots(self, max_model_len: int) -> ContentRoots:
        """Return an object that computes content roots of requests. Requests with equal roots may share cached blocks.

        Args:
            max_model_len: The maximum number of tokens of a request.
        """
        return ContentRoots(max_model_len, self.long_rope_beyond)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer with attention, in tokens.

        A layer that attends to all tokens has None.
        """
        return tuple(cache.window for cache in self.caches if cache is not None)

    @property
    def head(self) -> LinearSpec:
        """Return the matrix product of the output layer (lm_head), which computes logits."""
        return LinearSpec("lm_head", self.hidden, (("head", self.rows),), form=self.head_form)

    def linears(self) -> Iterator[LinearSpec]:
        """Yield the matrix products of all layers. The output layer is left out."""
        for layer in self.layers:
            yield from layer.linears
