"""A decoder layer of compiled CPU operators, which runs in one call instead of eight."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache, RopeTable
from batchinfer.models.ops.cpu_linear import CompiledAdapters, CompiledLinear
from batchinfer.models.ops.layers import DecoderLayer, LayerParts, Linear
from batchinfer.models.spec.parameters import BIAS
from batchinfer.models.spec.spec import AttentionSpec, FeedForwardSpec, LayerSpec
from batchinfer_kernels.cpu.attention_plan import Items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.layer import (
    NORMS,
    PRE_NORMS,
    SUM_NORMS,
    LayerRoom,
    LayerRotation,
    LayerSizes,
    LayerWeights,
    PackedLayer,
    StepPlaces,
)
from batchinfer_kernels.cpu.low_rank import PackedLowRank


class ItemPlan(AttentionPlan):
    """The attention plan of a step for one cache group on a CPU: work items, and buffers that layers share."""

    padded_tokens = 0

    def __init__(self, inputs: AttentionInputs, items: Items, other_group: ItemPlan | None = None) -> None:
        """Create the plan.

        Args:
            inputs: The inputs of the step.
            items: The work items into which attention is divided.
            other_group: The plan of another cache group for the same step. None: this is the first group.
        """
        self.inputs, self.items = inputs, items
        self.room: LayerRoom | None = None
        self.step: list[ItemPlan] = [] if other_group is None else other_group.step  # the plans of all groups
        self.step.append(self)

    def find_room(self, x: Tensor, residual: Tensor | None) -> LayerRoom | None:
        """Return the buffers in which an earlier layer left x and residual; None if they are in none.

        Args:
            x: (T, hidden), the input of the next layer.
            residual: (T, hidden), which is added to x. None: there is none.
        """
        rooms = (plan.room for plan in self.step if plan.room is not None)
        return next((room for room in rooms if room.holds(x, residual)), None)


class CompiledLayer(DecoderLayer):
    """A decoder layer that is computed by one call of compiled code.

    Its results are in buffers of the step's plan, which the next layer overwrites.
    """

    def __init__(self, compiled: CompiledOperators, spec: LayerSpec, parts: LayerParts) -> None:
        """Pack a layer for the compiled code. `covers` must accept the layer.

        Args:
            compiled: The compiled operators.
            spec: The layer.
            parts: Its packed weights.

        Raises:
            ValueError: Shapes or dtypes of weights do not match.
        """
        self._compiled = compiled
        attention = spec.attention
        assert isinstance(attention, AttentionSpec), "see `covers`"
        assert parts.rope is not None, "heads are rotated, if by an angle of 0"
        linears = {name: cast(CompiledLinear, linear).weight for name, linear in parts.linears.items()}
        assert isinstance(spec.feed_forward, FeedForwardSpec), "see `covers`"
        names = ("qkv", "o", spec.feed_forward.first, "down")
        norms = {name: norm for name, norm in spec.norms.items() if name in NORMS}
        biases = {name: parts.norms[name + BIAS] for name in norms if name + BIAS in parts.norms}
        norm = next(iter(norms.values()))
        weights = LayerWeights(
            norms={name: parts.norms[name] for name in norms},
            rotation=_rotation(parts, parts.rope),
            qkv=linears["qkv"],
            o=linears["o"],
            up=linears[spec.feed_forward.first],
            down=linears["down"],
            window=attention.window,
            sinks=parts.vectors.get("sinks"),
            adapters=tuple(_adapters(parts, name) for name in names),
            biases=biases,
            centred=norm.kind == "layer",
            norms_sums=spec.norms_sums,
        )
        sizes = LayerSizes(
            q_heads=attention.q_heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            eps=norm.eps,
            soft_cap=attention.soft_cap,
            offset=norm.offset,
        )
        self._layer = PackedLayer(weights, sizes)

    @staticmethod
    def covers(spec: LayerSpec, parts: LayerParts, widens: bool) -> bool:
        """Return True if the compiled code can compute a layer in one call.

        All matrix products of the layer must be compiled. Some kinds of layers are unsupported, such as layers that
        compute attention and feed-forward in parallel.

        Args:
            spec: The specification of the layer.
            parts: Its packed weights.
            widens: True if the compiled code supports weights in MXFP4.
        """
        attention = spec.attention
        if not isinstance(attention, AttentionSpec):
            return False
        heads = attention.norms_heads or attention.q_norm is None
        return (
            all(_is_compiled(linear, widens) for linear in parts.linears.values())
            and isinstance(spec.feed_forward, FeedForwardSpec)
            and heads
            and attention.kv_layer is None
            and parts.distances is None
            and _covers_norms(spec)
            and not spec.parallel
            and spec.residual_multiplier == 1
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: AttentionInputs,
        cache: LayerCache | None,
        plan: AttentionPlan | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for a step's tokens. See `DecoderLayer.__call__` for arguments and results.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, ItemPlan):
            raise TypeError(f"{type(plan).__name__} was not made by the CPU's operators")
        assert cache is not None, "it has attention"
        room = plan.room
        if room is None or not self._is_in(room, x, residual, cache.block_size):
            room = plan.room = self._room(x, inputs, cache, plan, plan.find_room(x, residual))
            if residual is not None and residual is not room.residual:
                room.residual.copy_(residual)
        first = residual is None
        self._compiled.decoder_layer(self._layer, room, cache.k, cache.v, first, cache.scales)
        return room.x, None if self._layer.weights.norms_sums else room.residual

    def _is_in(self, room: LayerRoom, x: Tensor, residual: Tensor | None, block_size: int) -> bool:
        same = room.places.block_size == block_size
        return room.holds(x, residual) and same and room.fits(self._layer)

    def _room(
        self, x: Tensor, inputs: AttentionInputs, cache: LayerCache, plan: ItemPlan, beside: LayerRoom | None
    ) -> LayerRoom:
        sizes, items = self._layer.sizes, plan.items
        places = StepPlaces(
            inputs.positions,
            inputs.slots,
            inputs.block_tables,
            items,
            cache.block_size,
            inputs.parts,
            inputs.adapted,
        )
        shape = self._compiled.cache_shape(sizes.kv_heads, cache.block_size, sizes.head_dim)
        state = self._compiled.attention_state(items, len(x), sizes.q_heads, shape[2])
        return LayerRoom(x, self._layer, places, shape, state, beside)


def _covers_norms(spec: LayerSpec) -> bool:
    norms, wanted = spec.norms, set(SUM_NORMS if spec.norms_sums else PRE_NORMS)
    return (
        norms.keys() >= wanted and len({(norm.kind, norm.eps, norm.offset) for norm in norms.values()}) == 1
    )


def _is_compiled(linear: Linear, widens: bool) -> bool:
    return isinstance(linear, CompiledLinear) and (widens or not linear.weight.widened)


def _adapters(parts: LayerParts, name: str) -> PackedLowRank | None:
    adapters = parts.adapters.get(name)
    return None if adapters is None else cast(CompiledAdapters, adapters).factors


def _rotation(parts: LayerParts, rope: RopeTable) -> LayerRotation:
    norms = parts.norms
    return LayerRotation(rope.cos, rope.sin, rope.interleaved, norms.get("q_norm"), norms.get("k_norm"))
