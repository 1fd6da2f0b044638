"""The spec of a model that transformers computes, or why it cannot run. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchinfer.core.content_root import ContentRoots
from batchinfer.models.spec.spec import Caches, CacheSpec
from batchinfer_kernels.arithmetic import Dtype
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, attention_cost, linear_cost, sample_cost


class CannotRun(Exception):
    """A model cannot be run with transformers' code in the engine, or would give wrong answers.

    Args:
        reason: The reason in general words, such as "it is an encoder and a decoder".
        detail: What exactly this model has. Empty: nothing to add.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class ForeignLayer:
    """The attention of one layer of a model that transformers computes.

    Args:
        q_heads: The number of query heads.
        kv_heads: The number of KV heads.
        k_dim: The size of a key.
        v_dim: The size of a value.
        scale: The factor of scores.
        window: The number of keys that a query attends to, its own included. None: all earlier keys.
        soft_cap: If set, scaled scores become soft_cap * tanh(score / soft_cap).
        sinks: If True, the softmax of each head includes one more score, which has no value. The layer passes the
            scores with every attention call.
    """

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """Return the size of a cached head: the larger of K and V, rounded up to an even number for operators."""
        widest = max(self.k_dim, self.v_dim)
        return widest + widest % 2

    @property
    def cache(self) -> CacheSpec:
        """Return the sizes of the KV cache that the layer needs."""
        return CacheSpec(self.kv_heads, self.head_dim, self.window)


@dataclass(frozen=True, slots=True)
class ForeignSpec:
    """The sizes and attention of a decoder that transformers computes, found by running its code without weights.

    Attributes:
        family: `model_type` of config.json.
        architecture: The name of transformers' class.
        decoder: The path of the submodule that computes hidden states from token ids.
        version: The version of transformers.
        hidden: The size of hidden states.
        vocab: The number of logits per token.
        max_positions: The maximum number of tokens of a sequence.
        eos_token_ids: The tokens that end an answer.
        dtype: The dtype that config.json states. None: it states none.
        layers: The attention of each layer.
        parameters: The number of all weight values.
        active: The number of weight values that are used per token, without the head.
        head: The number of weight values of the output layer (lm_head).
        streamed: The maximum number of weight values that a step reads, without embedding and head.
        causal: True, as tokens attend only to earlier tokens. Other models are not supported.
    """

    family: str
    architecture: str
    decoder: str
    version: str
    hidden: int
    vocab: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: Dtype | None
    layers: tuple[ForeignLayer, ...]
    parameters: int
    active: int
    head: int
    streamed: int

    causal: ClassVar[bool] = True

    @property
    def caches(self) -> Caches:
        """Return the sizes of the KV cache of each layer."""
        return [layer.cache for layer in self.layers]

    def content_roots(self, max_model_len: int) -> ContentRoots:
        """Return an object that computes content roots of requests. Requests with equal roots may share cached blocks.

        All requests have one root, since transformers rotates the keys of all rows in the same way.

        Args:
            max_model_len: The maximum number of tokens of a request.
        """
        return ContentRoots(max_model_len)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, in keys; None for a layer that attends to all earlier keys."""
        return tuple(layer.window for layer in self.layers)


def foreign_cost(spec: ForeignSpec, itemsize: int) -> ModelCost:
    """Return the FLOPs and memory traffic of the steps of a model that transformers computes.

    Everything except attention and the output layer counts as one operator. Its cost is estimated from the number of
    weight values. The traffic of most activations is left out.

    Args:
        spec: The sizes and attention of the model.
        itemsize: Bytes of a weight, an activation or a cached value.
    """
    decoder = OperatorCost(
        "decoder",
        step=Cost(0, spec.streamed * itemsize),
        token=Cost(2 * spec.active, 2 * spec.hidden * itemsize),
    )
    kept = [layer.cache.token_bytes(itemsize) for layer in spec.layers]
    head, none = (linear_cost(n, spec.hidden, spec.vocab, itemsize, itemsize) for n in (1, 0))
    sample = sample_cost(1, spec.vocab, itemsize)
    return ModelCost(
        operators=(
            decoder,
            _attention(spec, itemsize),
            OperatorCost("copy_parts", copied=Cost(0, 2 * sum(kept))),
            OperatorCost("lm_head", step=none, sampled=head - none, only_sampled=True),
            OperatorCost("sample", sampled=sample, only_sampled=True),
        ),
        windows=spec.windows,
        parameters=spec.streamed,
        active_parameters=max(1, spec.active),
        head_parameters=spec.head,
        caches=tuple((layer.window, size) for layer, size in zip(spec.layers, kept, strict=True)),
        itemsize=itemsize,
        weight_itemsize=itemsize,
    )


def _attention(spec: ForeignSpec, itemsize: int) -> OperatorCost:
    token = pair = cached = Cost()
    for layer in spec.layers:
        sizes = (layer.q_heads, layer.kv_heads, layer.head_dim, itemsize)
        token += attention_cost(1, 0, 0, *sizes)
        pair += attention_cost(0, 1, 0, *sizes)
        cached += attention_cost(0, 0, 1, *sizes)
    pair, cached = (Cost(c.flops // len(spec.layers), c.bytes // len(spec.layers)) for c in (pair, cached))
    return OperatorCost("attention", token=token, pair=pair, kv_token=cached)
