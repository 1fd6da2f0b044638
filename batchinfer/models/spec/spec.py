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
        offset: Added to the weights before values are multiplied with them; Gemma's weights are differences from 1.
        heads: If set, the input has this many groups of `width` values, each with its own weights.
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
        inputs: Inputs per token.
        parts: The parameters that are concatenated in the weight, such as "q", with their numbers of outputs.
        biased: True if each part has a bias.
        activation: The function after the product.
        gated: If True, the first half of the outputs is the gate of the second half.
        exact: If True, the weight is never quantised, and the results are float32.
        experts: The number of experts whose weights are concatenated; 0 if the product does not belong to experts.
        chosen: The number of experts that compute a token.
        heads: If not 0, the weight has a part per head, with which queries and results of latent attention are
            multiplied.
        form: How the weight is quantised or sparse in memory. None: in the dtype of the run.
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
        """Return the outputs per token; of a single expert if the product belongs to experts."""
        return sum(outputs for _, outputs in self.parts) // max(1, self.experts)

    @property
    def stored(self) -> bool:
        """Return True if the weight stays in memory as in the checkpoint: quantised, or sparse without its zeros."""
        return self.form is not None and self.form.stored

    @property
    def stored_codes(self) -> bool:
        """Return True if the weight stays in memory as in the checkpoint, and is quantised."""
        return self.form is not None and self.form.stored and self.form.coded

    @property
    def values(self) -> int:
        """Return the number of values of the weight (of all experts), without the bias."""
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def active_values(self) -> int:
        """Return the number of weight values that one token is multiplied with, which leaves out unchosen experts."""
        return self.inputs * self.outputs * self.chosen


INT4_GROUP = 32  # inputs that share a scale when this program quantises weights to int4


def form_of(linear: LinearSpec, codes: WeightCodes) -> WeightForm:
    """Return the form of a weight that is quantised on loading.

    Args:
        linear: The product. If its weight has a part per head, it uses int8 instead of int4.
        codes: The type of the quantised values.
    """
    if codes != "int4":
        return WeightForm(codes)
    return WeightForm("int8") if linear.heads else WeightForm("int4", "group", group=INT4_GROUP)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The KV cache of a layer.

    Args:
        heads: The number of KV heads.
        dim: Values of K, and of V, per head.
        window: The number of tokens that a query sees, its own included. None: all.
        latent: If True, K and V are computed from the same values, which are stored once.
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
        """Return the bytes of some values of one head of one token.

        Args:
            dim: The number of values.
            itemsize: Bytes of a value that is not quantised.
        """
        return dim * itemsize if self.dtype is None else dim + SCALE_BYTES

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token in the cache, with `itemsize` bytes per value that is not quantised."""
        return self.tensors * self.heads * self.head_bytes(self.dim, itemsize)

    @property
    def layout(self) -> tuple[object, ...]:
        """Return what determines the layout of a token in a block; layers with equal layouts can share blocks."""
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
    """Yield error messages about the caches of a model's layers that contradict each other."""
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
        rope: The angles. None: nothing is rotated.
        dim: The number of rotated values of a head. They are its first values.
        interleaved: If True, pairs are (2i, 2i + 1), otherwise (i, i + dim / 2).
    """

    rope: RopeConfig | None
    dim: int
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The mask and score rules of a layer's attention, and the dtype of its cache.

    Args:
        window: The number of keys that a query sees, its own included. None: all.
        soft_cap: If set, scores become soft_cap * tanh(score / soft_cap).
        sinks: If True, each query head has a score without a value that takes part in every softmax.
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
        scale: Factor of scores.
        rotation: The rotary embedding of q and k.
        window: The number of keys that a query sees, its own included. None: all.
        soft_cap: If set, scores become soft_cap * tanh(score / soft_cap).
        sinks: If True, each query head has a score without a value that takes part in every softmax.
        q_norm: The norm of q before the rotation: of each head if it is as wide as a head, else of all heads together.
        k_norm: The same for k.
        qkv_bias: True if q, k and v have biases.
        o_bias: True if the output projection has a bias.
        kv_layer: An earlier layer whose K and V this layer reads (Brandon et al., 2024, "cross-layer attention"). Both
            have equal KV heads and windows, and k_norm is that layer's.
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
        """Return the mask and score rules, and the dtype of the cache."""
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
        """Return True if an RMSNorm over single heads precedes the rotation, which the same operator computes."""
        norm = self.q_norm
        return norm is not None and norm.shape == (self.head_dim,) and norm.kind == "rms"

    @property
    def cache(self) -> CacheSpec:
        """Return the KV cache of the layer."""
        return CacheSpec(
            self.kv_heads, self.head_dim, window=self.window, shared=self.kv_layer, dtype=self.cache_dtype
        )

    @property
    def first(self) -> str:
        """Return the name of the product that reads the layer's input: "qkv", or "q" with `kv_layer`."""
        return "qkv" if self.kv_layer is None else "q"

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Return the matrix products in the order in which they run; `hidden` is the size of a hidden state."""
        q, kv = ("q", self.q_width), (("k", self.kv_width), ("v", self.kv_width))
        return (
            LinearSpec(self.first, hidden, (q, *kv) if self.kv_layer is None else (q,), self.qkv_bias),
            LinearSpec("o", self.q_width, (("o", hidden),), self.o_bias),
        )

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """Return the norms of q and k by parameter name; None for a norm that the layer does not have."""
        return {"q_norm": self.q_norm} | ({"k_norm": self.k_norm} if self.kv_layer is None else {})


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2").

    K and V of all heads are products of one normed vector per token, the latent. The cache stores the latent and the
    rotated values of k, which all heads share.

    Args:
        q_heads: The number of query heads.
        rank: Values of the latent.
        plain_dim: Values of a head of q and k that are not rotated; the rotated values follow.
        v_dim: Values of a head of v.
        scale: Factor of scores.
        rotation: The rotary embedding.
        q_rank: If set, q is a product of a normed vector with this many values.
        biased: True if the products q_a, kv_a and o have biases.
        eps: The epsilon of the norms of latents and of compressed queries.
        window: Always None: a query sees all keys.
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
        """Return the number of query heads per KV head, which is all of them: the cache has one head."""
        return self.q_heads

    @property
    def q_dim(self) -> int:
        """Return the number of values of a head of q."""
        return self.plain_dim + self.rotation.dim

    @property
    def head_dim(self) -> int:
        """Return the number of cached values of a token: the latent, and the rotated values of k."""
        return self.rank + self.rotation.dim

    @property
    def cache(self) -> CacheSpec:
        """Return the KV cache of the layer, which stores latents."""
        return CacheSpec(1, self.head_dim, latent=True)

    def linears(self, hidden: int) -> tuple[LinearSpec, ...]:
        """Return the matrix products in the order in which they run; `hidden` is the size of a hidden state.

        In `kv_b`, k and v of each head are adjacent.
        """
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
        """Return the norms of compressed queries (None without any) and of latents by parameter name."""
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
        """Return the name of the product that reads the input: "gate_up" or "up"."""
        return "gate_up" if self.gated else "up"

    def linears(self, hidden: int, start: str = "") -> tuple[LinearSpec, LinearSpec]:
        """Return the matrix products in the order in which they run.

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
        number: The number of the expert in the layer.
        turn: The rank computes the expert's tokens whose position in the step is `turn` modulo `copies`.
        copies: The number of ranks that hold the expert.
    """

    number: int
    turn: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (Shazeer et al., 2017): gated feed-forward halves, a few of them per token.

    A router computes logits, `routing` chooses experts by them, and the weighted results are added up.

    Args:
        routing: How experts are chosen for a token.
        inner: The number of intermediate values of an expert.
        activation: The activation of an expert.
        biased: True if the products of experts have biases.
        router_biased: True if the router has a bias.
        shared: A feed-forward half that all tokens use; its results are added. None: there is none.
        shared_gated: If True, the results of `shared` are multiplied with a sigmoid gate, one value per token.
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
        """Return the numbers of the experts of this rank, ascending."""
        return tuple(range(self.routing.experts) if self.held is None else (one.number for one in self.held))

    @property
    def chosen(self) -> int:
        """Return how many experts of this rank a token uses on average, rounded down, at least 1."""
        each = len(self.numbers) if self.held is None else sum(1 / one.copies for one in self.held)
        return max(1, int(self.routing.chosen * each / self.routing.experts + 1e-9))

    def linears(self, hidden: int) -> Iterator[LinearSpec]:
        """Yield the matrix products in the order in which they run; `hidden` is the size of a hidden state."""
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
        """Return name and length of the parameters that belong to no product: "correction", if routing uses it."""
        return {"correction": self.routing.experts} if self.routing.corrected else {}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer.

    It computes h += m * attention_norm(attention(input_norm(h))), then h += m *
    feed_forward_norm(feed_forward(post_norm(h))), with m = `residual_multiplier`. Norms that are None are skipped.

    Args:
        hidden: The size of a hidden state.
        input_norm: The norm before attention.
        attention: None: the layer is the feed-forward half only, and has neither input_norm nor attention_norm.
        post_norm: The norm before the feed-forward half.
        feed_forward: The feed-forward half.
        attention_norm: The norm after attention.
        feed_forward_norm: The norm after the feed-forward half.
        residual_multiplier: The factor of both halves' results.
        parallel: If True, both halves read the input of the layer, through the same norm if there is no post_norm.
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
        """Return the KV cache that the layer stores or reads; None without attention."""
        return None if self.attention is None else self.attention.cache

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Return the matrix products in the order in which they run."""
        attending = () if self.attention is None else self.attention.linears(self.hidden)
        found, forms = (*attending, *self.feed_forward.linears(self.hidden)), dict(self.forms)
        return tuple(replace(each, form=forms.get(each.name)) for each in found) if forms else found

    def quantized(self, codes: WeightCodes) -> LayerSpec:
        """Return a copy of the layer with weights quantised to `codes`, except exact and already quantised ones."""
        forms = ((each.name, each.form or form_of(each, codes)) for each in self.linears if not each.exact)
        return replace(self, forms=tuple(forms))

    @property
    def vectors(self) -> dict[str, int]:
        """Return name and length of the parameters that belong to no product or norm; they are float32."""
        attention = self.attention
        of_experts = self.feed_forward.vectors if isinstance(self.feed_forward, ExpertsSpec) else {}
        if isinstance(attention, AttentionSpec) and attention.sinks:
            return {"sinks": attention.q_heads, **of_experts}
        return of_experts

    @property
    def norms(self) -> dict[str, NormSpec]:
        """Return the norms that the layer has, by parameter name."""
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
    """A classification head of an encoder: out(norm(activation(dense(x)))), with x the pooled hidden states.

    Args:
        labels: The number of labels, and of logits per row.
        activation: The activation after dense.
        pooling: How hidden states of a row are pooled.
        biased: True if dense has a bias; out always has one.
        norm: The norm before out. None: there is none.
    """

    labels: int
    activation: HeadActivation
    pooling: Pooling = "cls"
    biased: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder: each token also sees later tokens, and no tokens are generated.

    It has no head for logits of tokens, but may have a `classifier`. A window extends to both sides: a query sees the
    keys at a distance less than the window.

    Args:
        embedding_norm: The norm of the sum of the embeddings of token, position and type.
        token_types: The number of token types; 0 without an embedding of types.
        first_position: The row of the first token's position in the table of learned positions.
        distance_buckets: If set, each head adds a learned number to scores, by the distance of query and key (MPNet;
            see models/decoder/positions.py).
        classifier: The classification head. None: there is none.
    """

    embedding_norm: NormSpec | None = None
    token_types: int = 0
    first_position: int = 0
    distance_buckets: int = 0
    classifier: ClassifierSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder with an embedding, layers, a norm and a head; or an encoder without the head; or a shard of a model.

    Args:
        family: The `model_type` of its family.
        hidden: The size of a hidden state.
        vocab: The number of tokens in the vocabulary.
        layers: The layers.
        final_norm: The norm after the last layer. None: there is none.
        tied: If True, the head is the embedding, unless the checkpoint has a different head.
        max_positions: The maximum length of a sequence in tokens.
        eos_token_ids: The tokens that end a sequence.
        bos_token_id: The token at the start of a sequence. None: not stated.
        dtype: The dtype that config.json states. None: none, or an unsupported one.
        embedding_multiplier: Factor of embeddings, rounded to the dtype of the run.
        logit_multiplier: Factor of logits.
        logit_cap: If set, logits become cap * tanh(logit / cap).
        learned_positions: If True, a learned embedding of the position is added to the embedding of a token.
        encoder: The properties of an encoder. None: the model is a decoder.
        head_form: The form of the head if it is quantised. None: it is in the dtype of the run.
        begins: True if this shard has the embedding.
        ends: True if this shard has the final norm and the head.
        tokens: The tokens whose rows embedding and head of this shard have, (first, end). None: all.
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
        """Return the number of rows of embedding and head: the vocabulary, or the shard's part of it."""
        return self.vocab if self.tokens is None else self.tokens[1] - self.tokens[0]

    @property
    def has_head(self) -> bool:
        """Return True if the model, or this shard of it, computes logits of tokens."""
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
        """Return a copy of the model without its classification head."""
        encoder = self.encoder
        return self if encoder is None else replace(self, encoder=replace(encoder, classifier=None))

    @property
    def attention(self) -> AttentionSpec | LatentAttentionSpec:
        """Return the attention of the first layer that has one; all layers share its heads and sizes."""
        return next(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def caches(self) -> Caches:
        """Return the KV cache of each layer; None for a layer without attention."""
        return tuple(layer.cache for layer in self.layers)

    def with_cache_dtype(self, kept: KvCacheDtype) -> ModelSpec:
        """Return a copy of the model with a KV cache of dtype `kept`. "auto" changes nothing; latents keep theirs."""
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
        """Return a copy of the model whose weights are quantised on loading, except already quantised ones.

        Other values than "int4", "int8" and "fp8" change nothing.
        """
        if quantization not in ("int4", "int8", "fp8"):
            return self
        layers = tuple(layer.quantized(quantization) for layer in self.layers)
        # The head is never quantised to int4: errors of logits change tokens directly
        return replace(self, layers=layers, head_form=WeightForm("fp8" if quantization == "fp8" else "int8"))

    @property
    def forms(self) -> frozenset[WeightForm]:
        """Return the different forms of all quantised or sparse weights, head included."""
        linears = (*self.linears(), *([self.head] if self.has_head else []))
        return frozenset(linear.form for linear in linears if linear.form is not None)

    @property
    def long_rope_beyond(self) -> int | None:
        """Return the length in tokens beyond which sequences use LongRoPE's long rotation; None without LongRoPE."""
        rope = self.attention.rotation.rope
        return rope.original_max_positions if rope is not None and rope.kind == "longrope" else None

    def content_roots(self, max_model_len: int) -> ContentRoots:
        """Return the rule by which requests may share cached blocks, for up to `max_model_len` tokens per request."""
        return ContentRoots(max_model_len, self.long_rope_beyond)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window in tokens of each layer with attention; None for a layer that sees all tokens."""
        return tuple(cache.window for cache in self.caches if cache is not None)

    @property
    def head(self) -> LinearSpec:
        """Return the matrix product that computes logits (lm_head)."""
        return LinearSpec("lm_head", self.hidden, (("head", self.rows),), form=self.head_form)

    def linears(self) -> Iterator[LinearSpec]:
        """Yield the matrix products of all layers, without the head."""
        for layer in self.layers:
            yield from layer.linears
