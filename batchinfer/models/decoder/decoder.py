"""A decoder over a paged KV cache, or an encoder, as its spec describes it, made of `ops`."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from batchinfer.models.decoder.attention import AttentionBoundary, StaticBuffers
from batchinfer.models.decoder.block import Block, build_layer
from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.decoder.packed import PackedWeights
from batchinfer.models.decoder.positions import distance_table, position_table, rope_table
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache, RopeTable
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import Head, finite_argmax
from batchinfer.models.parallel.sharded_ops import SplitEmbedding
from batchinfer.models.spec.parameters import EMBEDDING_NORM, FINAL_NORM
from batchinfer.models.spec.spec import ModelSpec, Rotation
from batchinfer_kernels.low_rank import AdaptedRows


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Takes what some layers read in one step: their numbers, ascending, where the number of all layers stands for what
    the last one gives, and (T, hidden) for each of them."""

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)

    def record(self, layer: int, x: Tensor, residual: Tensor | None) -> None:
        """Take what this layer reads, x + residual, if it is asked for."""
        if layer in self.layers:  # what a layer is given it may overwrite
            self.states.append(x.clone() if residual is None else x + residual)


class Decoder:
    """Token ids and their places in; hidden states and, for the rows asked for, logits out.

    Holds no sequence state: the KV cache is the caller's. Call under `torch.inference_mode()`.
    """

    def __init__(self, packed: PackedWeights, ops: Ops, max_positions: int) -> None:
        """Sequences may be up to `max_positions` long: so much is computed of the rotary tables. `ops` may differ from
        those that packed the weights in how they read prompts."""
        spec = packed.spec
        self.spec, self.max_positions = spec, max_positions
        self._ops = ops
        self._tables, self._head = packed.tables, packed.head
        self.classifier, self._adapters = packed.classifier, packed.adapters
        self.adapter_places = packed.adapter_places
        self._changed = [each for layer in packed.layers for each in layer.adapters.values()]
        self._split = None if spec.tokens is None else SplitEmbedding(ops, spec.tokens, packed.ranks.tensor)
        self._positions, distances = position_table(spec, packed.tables), None
        if packed.tables.distances is not None:
            distances = distance_table(packed.tables.distances, max_positions)
        self._multiplier = _rounded(spec.embedding_multiplier, self._tables.embedding.dtype)
        ropes = {layer.rotation for layer in spec.layers if layer.rotation is not None}
        tables: dict[Rotation | None, RopeTable] = {
            rope: rope_table(rope, max_positions, packed.device) for rope in ropes
        }
        self._layers = [
            build_layer(ops, layer, replace(parts, rope=tables.get(layer.rotation), distances=distances))
            for layer, parts in zip(spec.layers, packed.layers, strict=True)
        ]
        self._attending = [index for index, layer in enumerate(spec.layers) if layer.attention is not None]

    @property
    def embedding(self) -> Tensor:
        """The table of its tokens, (vocab, hidden)."""
        return self._tables.embedding

    @property
    def head(self) -> Head:
        """The layer that makes logits of states behind the final norm."""
        assert self._head is not None, "an encoder makes no logits"
        return self._head

    @property
    def expert_loads(self) -> ExpertLoads:
        """How many tokens the experts of its layers were given; empty where there are none."""
        found = {index: layer.loads for index, layer in enumerate(self._layers)}
        return ExpertLoads({index: loads for index, loads in found.items() if loads is not None})

    def place_adapter(self, number: int, place: int) -> None:
        """Put an adapter where tokens find it that have this place in place of its number, in steps that are launched
        from now on."""
        for adapters in self._changed:
            adapters.place(number, place)

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
        before: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run one step: token_ids (T,) int64 → hidden states (T, hidden) before the final norm. A model that does not
        begin with the embedding takes the hidden states that the layers before it gave, `before`, in place of them;
        they have the bits that they have within one model. `taps` are given what layers read.

        Writes K and V of the step's tokens to `caches`, one for each layer with attention, which names its group:
        `inputs` and `plans`, which come from `ops.plan_attention`, have an element a group. Raises ValueError for a
        position that the rotary table does not have: compiled operators would read behind it.
        """
        longest = max(inputs[0].context_lens)
        if longest > self.max_positions:
            raise ValueError(f"a context of {longest} tokens, and {self.max_positions} positions")
        inputs = self._sorted(inputs)
        x = self._embedded(token_ids, inputs[0]) if before is None else before
        residual: Tensor | None = None
        places = dict(zip(self._attending, caches, strict=True))
        for index, layer in enumerate(self._layers):
            cache = places.get(index)
            if taps is not None:
                taps.record(index, x, residual)
            if cache is None:
                x, residual = layer(x, residual, inputs[0], None, None)
            else:
                x, residual = layer(x, residual, inputs[cache.group], cache, plans[cache.group])
        if taps is not None:
            taps.record(len(self._layers), x, residual)
        return x if residual is None else x + residual

    def forward_split_at_attention(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        before: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run `forward`, yielding before each layer's attention, whose result the caller computes and sends.

        Of `inputs` only positions, slots and the padding slot are read: what is launched between two boundaries depends
        on the number of tokens alone. Not for operators that fuse layers.
        """
        inputs = self._sorted(inputs)
        x = self._embedded(token_ids, inputs[0]) if before is None else before
        residual: Tensor | None = None
        places = dict(zip(self._attending, caches, strict=True))
        for index, layer in enumerate(self._layers):
            cache = places.get(index)
            if taps is not None:
                taps.record(index, x, residual)
            if cache is None:
                x, residual = layer(x, residual, inputs[0], None, None)
                continue
            assert isinstance(layer, Block), "a fused layer cannot be stopped"
            own = inputs[cache.group]
            queries, normed, residual = layer.begin(x, residual, own, cache)
            attended = yield AttentionBoundary(queries, layer.attention, cache)
            del queries, x  # whoever captures the pieces uses their memory again
            assert attended is not None, "what attention gave is to be sent"
            x, residual = layer.end(attended, normed, residual, own)
        if taps is not None:
            taps.record(len(self._layers), x, residual)
        return x if residual is None else x + residual

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate what `forward_split_at_attention` passes on, for steps of up to that many tokens."""
        embedding, hidden = self._tables.embedding, self.spec.hidden
        halves = [
            layer.attention.widths for layer in self._layers if isinstance(layer, Block) and layer.attends
        ]
        widest = (max(widths) for widths in zip(*halves, strict=True))
        queries, attended = (embedding.new_zeros(tokens * width) for width in widest)
        return StaticBuffers(tokens, queries, attended, embedding.new_zeros(tokens, hidden))

    def _sorted(self, inputs: Sequence[AttentionInputs]) -> Sequence[AttentionInputs]:
        """Sort the step's tokens by their adapter, where any has one, for all layers."""
        adapters = inputs[0].adapters
        if adapters is None:
            return inputs
        rows = AdaptedRows.of(adapters, self._adapters)
        return [replace(own, adapted=rows) for own in inputs]

    def _embedded(self, token_ids: Tensor, inputs: AttentionInputs) -> Tensor:
        assert self.spec.begins, "it takes the hidden states of earlier layers"
        table = self._tables.embedding
        x = self._ops.embedding(token_ids, table) if self._split is None else self._split(token_ids, table)
        if self._multiplier != 1:
            x = x * self._multiplier
        if self._positions is not None:
            places, types = inputs.positions, inputs.token_types
            places = places if types is None else places + types * self.spec.max_positions
            x = x + self._ops.embedding(places, self._positions)
        norm = None if self.spec.encoder is None else self.spec.encoder.embedding_norm
        return x if norm is None else self._ops.norm(norm, self._tables.norms, EMBEDDING_NORM, x)[0]

    def states(self, hidden: Tensor) -> Tensor:
        """hidden: rows of `forward` → (n, hidden), behind the final norm: what transformers calls last_hidden_state."""
        return self._normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: (n, hidden), the rows of `forward` to sample from → (n, vocab) float32."""
        assert self._head is not None, "an encoder makes no logits"
        logits = self._head(self._normed(hidden))
        if self.spec.logit_multiplier != 1:
            logits = logits * self.spec.logit_multiplier
        cap = self.spec.logit_cap
        return logits if cap is None else self._ops.cap_logits(logits, cap)

    def argmax(self, hidden: Tensor) -> Tensor:
        """hidden: as for `logits` → (n,) int64, the argmax of the logits; NO_TOKEN where they are no finite numbers."""
        if _keeps_order(self.spec):
            assert self._head is not None, "an encoder makes no logits"
            return self._head.argmax(self._normed(hidden))
        return finite_argmax(self.logits(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        norm = self.spec.final_norm
        return hidden if norm is None else self._ops.norm(norm, self._tables.norms, FINAL_NORM, hidden)[0]


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _keeps_order(spec: ModelSpec) -> bool:
    """Whether two logits that the head tells apart stay so: what is capped, or not multiplied with a power of two, may
    be rounded to equal numbers, of which the first is taken."""
    return spec.logit_cap is None and math.frexp(spec.logit_multiplier)[0] == 0.5
