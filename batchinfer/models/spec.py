"""What a model is: one description, from which shapes, names, memory, costs and operators are derived. No torch.

config.json ─▶ families/ ─▶ ModelSpec ─▶ parameters (shapes, dummy weights, what a checkpoint must hold)
                                     ├─▶ model_cost (what plan, report and step budgets count with)
                                     ├─▶ caches (memory of a block)
                                     └─▶ block, decoder (what runs), ops.fuse (a layer as one call)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from batchinfer.models.rope_config import RopeConfig
from batchinfer_kernels.arithmetic import Dtype

ActivationName = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm of `width` values: RMSNorm, or LayerNorm, which may have a bias."""

    width: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    biased: bool = False


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One matrix product. `parts` are the parameters that lie above one another in its weight, with their outputs;
    `biased` says whether each of them has a bias."""

    name: str
    inputs: int
    parts: tuple[tuple[str, int], ...]
    biased: bool = False

    @property
    def outputs(self) -> int:
        return sum(outputs for _, outputs in self.parts)

    @property
    def values(self) -> int:
        """Values of the weight, without the bias."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a layer keeps of each token: K and V of `heads` heads of `dim` values."""

    heads: int
    dim: int

    @property
    def values(self) -> int:
        """Values of one token."""
        return 2 * self.heads * self.dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention: q, k and v of the layer's input, rotated, and a projection back.

    `scale` multiplies scores. Of each head the first `rotary_dim` values are rotated. `window`: how many keys a query
    sees, its own included; None: all. `q_norm` and `k_norm` come before the rotation: of each head where they are as
    wide as a head, else of all heads together.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    rotary_dim: int
    window: int | None = None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def norms_heads(self) -> bool:
        """Whether each head of q and k has its norm."""
        return self.q_norm is not None and self.q_norm.width == self.head_dim

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)), `inner` values wide (Shazeer, 2020)."""

    inner: int
    activation: ActivationName
    biased: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A decoder layer: h += m * attention_norm(attention(input_norm(h))); then
    h += m * feed_forward_norm(feed_forward(post_norm(h))). A norm that is None is left out; m is `residual_multiplier`.
    Where it is `parallel`, the feed-forward half reads what attention reads, and there is no post_norm.
    """

    hidden: int
    input_norm: NormSpec | None
    attention: AttentionSpec
    post_norm: NormSpec | None
    feed_forward: FeedForwardSpec
    attention_norm: NormSpec | None = None
    feed_forward_norm: NormSpec | None = None
    residual_multiplier: float = 1.0
    parallel: bool = False

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Its matrix products, in the order in which they run."""
        a, f = self.attention, self.feed_forward
        qkv = (("q", a.q_width), ("k", a.kv_width), ("v", a.kv_width))
        return (
            LinearSpec("qkv", self.hidden, qkv, a.qkv_bias),
            LinearSpec("o", a.q_width, (("o", self.hidden),), a.o_bias),
            LinearSpec("gate_up", self.hidden, (("gate", f.inner), ("up", f.inner)), f.biased),
            LinearSpec("down", f.inner, (("down", self.hidden),), f.biased),
        )

    @property
    def norms(self) -> dict[str, NormSpec]:
        """By the name of their parameter."""
        found = {
            "input_norm": self.input_norm,
            "attention_norm": self.attention_norm,
            "post_norm": self.post_norm,
            "feed_forward_norm": self.feed_forward_norm,
            "q_norm": self.attention.q_norm,
            "k_norm": self.attention.k_norm,
        }
        return {name: norm for name, norm in found.items() if norm is not None}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder: an embedding, layers, a norm, and a head that makes logits. Sizes are counts of values. Embeddings and
    logits are multiplied with their multipliers."""

    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    tied: bool  # the head is the embedding, unless the checkpoint brings a different one
    max_positions: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: Dtype | None  # as config.json states it
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    @property
    def attention(self) -> AttentionSpec:
        """Of the first layer: but for windows, that of all."""
        return self.layers[0].attention

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def head(self) -> LinearSpec:
        return LinearSpec("lm_head", self.hidden, (("head", self.vocab),))

    def linears(self) -> Iterator[LinearSpec]:
        """Those of all layers, the head not among them."""
        for layer in self.layers:
            yield from layer.linears
