"""A decoder over a paged KV cache, or an encoder, built from its spec and from operators."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from batchinfer.models.decoder.attention import AttentionBoundary, StaticBuffers
from batchinfer.models.decoder.block import Block, build_layer
from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.decoder.packed_weights import PackedWeights
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
    """Records the inputs of some layers in one step of T tokens. Draft heads read them.

    Args:
        layers: The numbers of the layers, ascending. The number of layers itself means the output of the last layer.
        states: The recorded inputs, (T, hidden) each, in the order of `layers`.
    """

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)

    def record(self, layer: int, x: Tensor, residual: Tensor | None) -> None:
        """Append x + residual, which is the input of a layer, to `states`. Do nothing if `layers` lacks the layer.

        Args:
            layer: The number of the layer.
            x: (T, hidden).
            residual: (T, hidden). None: x is the whole input.
        """
        if layer in self.layers:  # layers may overwrite their inputs
            self.states.append(x.clone() if residual is None else x + residual)


class Decoder:
    """A model that computes hidden states from token ids and positions, and logits from hidden states.

    It has no state of sequences: the caller owns the KV cache. Call it under `torch.inference_mode()`.
    """

    def __init__(self, packed: PackedWeights, ops: Ops, max_positions: int) -> None:
        """Build the layers from packed weights.

        Args:
            packed: The packed weights.
            ops: The operators for which the weights were packed.
            max_positions: The maximum number of tokens of a sequence.
        """
        spec = packed.spec
        self.spec, self.max_positions = spec, max_positions
        self._ops = ops
        self._tables, self._head = packed.tables, packed.head
        self.classifier, self._adapters = packed.classifier, packed.adapters
        self.adapter_slots = packed.adapter_slots
        self._changed = [each for layer in packed.layers for each in layer.adapters.values()]
        self._split = None if spec.tokens is None else SplitEmbedding(ops, spec.tokens, packed.ranks.tensor)
        self._positions, distances = position_table(spec, packed.tables), None
        if packed.tables.distances is not None:
            distances = distance_table(packed.tables.distances, max_positions)
        self._multiplier = _round_to(spec.embedding_multiplier, self._tables.embedding.dtype)
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
        """Return the embedding table, (vocab, hidden). A rank of a sharded model has only some of its rows."""
        return self._tables.embedding

    @property
    def head(self) -> Head:
        """Return the output layer (lm_head), which computes logits from normed hidden states."""
        assert self._head is not None, "an encoder makes no logits"
        return self._head

    @property
    def expert_loads(self) -> ExpertLoads:
        """Return the counters of tokens per expert, for each layer with experts."""
        found = {index: layer.loads for index, layer in enumerate(self._layers)}
        return ExpertLoads({index: loads for index, loads in found.items() if loads is not None})

    def place_adapter(self, number: int, slot: int) -> None:
        """Copy a LoRA adapter to a slot on the device, which replaces the adapter in it for later steps.

        Args:
            number: The number of the adapter, from 1.
            slot: The number of the slot, from 1.
        """
        for adapters in self._changed:
            adapters.place(number, slot)

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
        before: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Compute the layers for one step of T tokens, and write K and V of the tokens to the caches.

        Args:
            token_ids: (T,) int64.
            inputs: Positions and cache slots of the tokens, one element per cache group.
            caches: The KV cache of each layer with attention, in the order of the layers.
            plans: The result of `ops.plan_attention` for each element of `inputs`.
            before: (T, hidden), the hidden states of the previous pipeline stage. None: this is the first stage.
            taps: Records the inputs of some layers. None: nothing is recorded.

        Returns:
            The hidden states after the last layer, before the final norm, (T, hidden).

        Raises:
            ValueError: A sequence has more tokens than `max_positions`.
        """
        # Compiled operators would read out of bounds
        longest = max(inputs[0].context_lens)
        if longest > self.max_positions:
            raise ValueError(f"a context of {longest} tokens, and {self.max_positions} positions")
        inputs = self._sort_by_adapter(inputs)
        x = self._embed(token_ids, inputs[0]) if before is None else before
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
        """Compute the layers for one step of T tokens, except attention, which the caller computes.

        This generator yields before the attention of each layer, and the caller must send the result of attention,
        (T, heads, v_dim). The kernels between two yields can be captured in a CUDA graph. Fused layers do not
        support this.

        Args:
            token_ids: (T,) int64.
            inputs: Positions and cache slots of the tokens, one element per cache group.
            caches: The KV cache of each layer with attention, in the order of the layers.
            before: (T, hidden), the hidden states of the previous pipeline stage. None: this is the first stage.
            taps: Records the inputs of some layers. None: nothing is recorded.

        Returns:
            The hidden states after the last layer, before the final norm, (T, hidden).
        """
        inputs = self._sort_by_adapter(inputs)
        x = self._embed(token_ids, inputs[0]) if before is None else before
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
            del queries, x  # lets graph capture reuse their memory
            assert attended is not None, "the caller must send the attention results"
            x, residual = layer.end(attended, normed, residual, own)
        if taps is not None:
            taps.record(len(self._layers), x, residual)
        return x if residual is None else x + residual

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the tensors through which captured CUDA graphs exchange values with attention.

        Args:
            tokens: The maximum number of tokens of a captured step.
        """
        embedding, hidden = self._tables.embedding, self.spec.hidden
        halves = [
            layer.attention.widths for layer in self._layers if isinstance(layer, Block) and layer.attends
        ]
        widest = (max(widths) for widths in zip(*halves, strict=True))
        queries, attended = (embedding.new_zeros(tokens * width) for width in widest)
        return StaticBuffers(tokens, queries, attended, embedding.new_zeros(tokens, hidden))

    def _sort_by_adapter(self, inputs: Sequence[AttentionInputs]) -> Sequence[AttentionInputs]:
        adapters = inputs[0].adapters
        if adapters is None:
            return inputs
        rows = AdaptedRows.of(adapters, self._adapters)
        return [replace(own, adapted=rows) for own in inputs]

    def _embed(self, token_ids: Tensor, inputs: AttentionInputs) -> Tensor:
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
        """Return hidden states after the final norm, (n, hidden), like `last_hidden_state` of transformers.

        Args:
            hidden: (n, hidden), rows of the result of `forward`.
        """
        return self._apply_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of n positions, (n, vocab) float32.

        Args:
            hidden: (n, hidden), rows of the result of `forward`.
        """
        assert self._head is not None, "an encoder makes no logits"
        logits = self._head(self._apply_norm(hidden))
        if self.spec.logit_multiplier != 1:
            logits = logits * self.spec.logit_multiplier
        cap = self.spec.logit_cap
        return logits if cap is None else self._ops.cap_logits(logits, cap)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the token with the greatest logit, (n,) int64; NO_TOKEN for rows whose logits are not finite.

        Args:
            hidden: (n, hidden), rows of the result of `forward`.
        """
        if _keeps_order(self.spec):
            assert self._head is not None, "an encoder makes no logits"
            return self._head.argmax(self._apply_norm(hidden))
        return finite_argmax(self.logits(hidden))

    def _apply_norm(self, hidden: Tensor) -> Tensor:
        norm = self.spec.final_norm
        return hidden if norm is None else self._ops.norm(norm, self._tables.norms, FINAL_NORM, hidden)[0]


def _round_to(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=dtype))


def _keeps_order(spec: ModelSpec) -> bool:
    # A cap, or a factor that is not a power of two, may round different logits to the same value
    return spec.logit_cap is None and math.frexp(spec.logit_multiplier)[0] == 0.5
