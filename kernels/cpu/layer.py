"""A decoder layer that runs as one call, and the buffers that the layers of a step share."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from batchinfer_kernels.copy_parts import FIELDS
from batchinfer_kernels.cpu.attention_plan import Items
from batchinfer_kernels.cpu.low_rank import AdaptedRoom, PackedLowRank, check_adapted_rows
from batchinfer_kernels.cpu.packed_weights import KINDS, PackedWeight, codes_room, scales_room
from batchinfer_kernels.cpu.structures import (
    AdaptedStructure,
    Attention,
    Heads,
    Layer,
    LayerStep,
    LowRankStructure,
    PartsStructure,
    RotationStructure,
    Weight,
    address,
    scoring,
)
from batchinfer_kernels.low_rank import AdaptedRows

# The norms that a layer can have, in the order of layer.h
NORMS = ("input_norm", "attention_norm", "post_norm", "feed_forward_norm")
PRE_NORMS, SUM_NORMS = ("input_norm", "post_norm"), ("attention_norm", "feed_forward_norm")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes and constants that all layers of a model share.

    Attributes:
        q_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: number of values of a head.
        scale: factor of q · k in attention.
        eps: epsilon of all norms.
        soft_cap: cap of attention scores, cap × tanh(score / cap); None: no cap.
        offset: added to the weights of all norms.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    soft_cap: float | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """The rotary embedding of a layer's q and k, and their norms.

    Attributes:
        cos: (positions, pairs) float32.
        sin: as `cos`.
        interleaved: which values form a pair; see `rotate_reference`.
        q_norm: (head_dim,), weight of the RMSNorm of each q head before the rotation, or None.
        k_norm: as `q_norm`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None

    def structure(self, sizes: LayerSizes) -> RotationStructure:
        """Return the rotation as a C structure, which points to the tensors: they must outlive it.

        Raises:
            ValueError: If the tables do not match the heads.
        """
        if self.cos.dim() != 2 or not 0 < 2 * self.cos.shape[1] <= sizes.head_dim:
            raise ValueError(f"cos {tuple(self.cos.shape)} does not match heads of {sizes.head_dim}")
        _check("sin", self.sin, tuple(self.cos.shape), torch.float32)
        _check("cos", self.cos, tuple(self.cos.shape), torch.float32)
        norms = (address(self.q_norm), address(self.k_norm), sizes.eps, sizes.offset)
        return RotationStructure(
            address(self.cos), address(self.sin), self.cos.shape[1], self.interleaved, *norms
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The packed weights of a decoder layer, which a PackedLayer runs.

    Attributes:
        norms: weight of each norm that the layer has; the names are in NORMS.
        rotation: rotary embedding and norms of the heads.
        qkv: projection to q, k and v.
        o: projection of the attention output.
        up: gate and up projection (a gated kind), or up projection with an activation. qkv, o and down are "plain".
        down: down projection.
        window: sliding window; None: full attention.
        sinks: (q_heads,) float32, the attention sinks, or None.
        adapters: the LoRA factors for each of qkv, o, up and down; None: no adapter changes this product.
        biases: bias of each norm that has one; the names are in NORMS.
        centred: True if the norms are LayerNorms.
        norms_sums: True in a post-norm model: the norms apply to the sums of residual and output, after attention and
            after the feed-forward part. False: they apply to the inputs of both parts, and optionally to their outputs.
    """

    norms: Mapping[str, Tensor]
    rotation: LayerRotation
    qkv: PackedWeight
    o: PackedWeight
    up: PackedWeight
    down: PackedWeight
    window: int | None
    sinks: Tensor | None = None
    adapters: tuple[PackedLowRank | None, ...] = (None,) * 4
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    centred: bool = False
    norms_sums: bool = False

    @property
    def linears(self) -> tuple[PackedWeight, ...]:
        """Return the weights qkv, o, up and down, in the order in which they run."""
        return self.qkv, self.o, self.up, self.down


class PackedLayer:
    """A decoder layer in the form that the C operators read.

    Raises:
        ValueError: If the weights do not match each other.
    """

    def __init__(self, weights: LayerWeights, sizes: LayerSizes) -> None:
        if sizes.q_heads % sizes.kv_heads:
            raise ValueError(f"{sizes.q_heads} query heads are not a multiple of {sizes.kv_heads} KV heads")
        self.weights, self.sizes = weights, sizes
        self.hidden, self.inner = weights.qkv.inputs, weights.up.columns
        self.dtype = next(iter(weights.norms.values())).dtype
        self.most_rank = max((one.most_rank for one in weights.adapters if one is not None), default=1)
        # Layers with equal keys can share a LayerRoom
        self.key = (*astuple(sizes), self.hidden, self.inner, self.most_rank, weights.norms_sums)
        self._check_linears()
        self._check_norms()
        self.structure = Layer(
            *(
                (ctypes.c_void_p * 4)(*(address(by.get(name)) for name in NORMS))
                for by in (weights.norms, weights.biases)
            ),
            *(Weight.from_buffer_copy(linear.structure) for linear in weights.linears),
            weights.rotation.structure(sizes),
            weights.window or 0,
            KINDS[weights.up.kind],
            weights.centred,
            weights.norms_sums,
            address(weights.sinks),
            (LowRankStructure * 4)(
                *(LowRankStructure() if one is None else one.structure for one in weights.adapters)
            ),
        )

    def _check_linears(self) -> None:
        sizes, weights = self.sizes, self.weights
        heads, attended = sizes.q_heads + 2 * sizes.kv_heads, sizes.q_heads * sizes.head_dim
        wanted = {
            "qkv": (heads * sizes.head_dim, self.hidden),
            "o": (self.hidden, attended),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        for name, shape in wanted.items():
            weight: PackedWeight = getattr(weights, name)
            if (weight.columns, weight.inputs) != shape:
                raise ValueError(f"{name} is {(weight.columns, weight.inputs)}, expected {shape}")
            if weight.dtype not in (None, self.dtype):
                raise ValueError(f"{name} is {weight.dtype}, the norms are {self.dtype}")
        for (name, _), own in zip(wanted.items(), weights.adapters, strict=True):
            product = getattr(weights, name)
            if own is not None and (own.outputs, own.inputs, own.dtype) != (
                product.outputs,
                product.inputs,
                self.dtype,
            ):
                raise ValueError(
                    f"adapters of {name} have {own.outputs} outputs of {own.inputs} inputs, in {own.dtype}"
                )

    def _check_norms(self) -> None:
        weights, heads = self.weights, self.weights.rotation
        wanted = SUM_NORMS if weights.norms_sums else PRE_NORMS
        if not set(wanted) <= weights.norms.keys() <= set(NORMS):
            raise ValueError(
                f"the layer has the norms {', '.join(weights.norms)}, expected {' and '.join(wanted)}"
            )
        for by in (weights.norms, weights.biases):
            for name, norm in by.items():
                _check(name, norm, (self.hidden,), self.dtype)
        for name in ("q_norm", "k_norm"):
            _check(name, getattr(heads, name), (self.sizes.head_dim,), self.dtype)
        _check("sinks", weights.sinks, (self.sizes.q_heads,), torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlaces:
    """The positions and cache slots of a step's T tokens, and the work items of its attention.

    Attributes:
        positions: (T,) int64.
        slots: (T,) int64, block * block_size + offset.
        block_tables: (sequences, blocks) int32.
        items: work items of attention.
        block_size: number of tokens of a block.
        parts: (n, 4) int64, parts of blocks to copy after the step's K and V are stored, as in `copy_parts`; None:
            nothing is copied.
        adapted: the tokens sorted by LoRA adapter; None: no token has an adapter.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    items: Items
    block_size: int
    parts: Tensor | None = None
    adapted: AdaptedRows | None = None

    def check(self, tokens: int) -> None:
        """Raise ValueError unless the tensors are contiguous on the CPU and have the right shapes.

        Args:
            tokens: number of tokens of the step.
        """
        _check("positions", self.positions, (tokens,), torch.int64)
        _check("slots", self.slots, (tokens,), torch.int64)
        _check("block_tables", self.block_tables, tuple(self.block_tables.shape[:2]), torch.int32)
        if self.parts is not None:
            _check("parts", self.parts, (len(self.parts), FIELDS), torch.int64)
        if self.adapted is not None:
            check_adapted_rows(self.adapted, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors:
    x: Tensor
    residual: Tensor
    attended: Tensor  # rotated q, and the output of attention
    rooms: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Tensor, layer: PackedLayer) -> _Tensors:
        tokens, sizes = len(x), layer.sizes
        left, residual = (x.clone(memory_format=torch.contiguous_format) for _ in range(2))
        attended = x.new_empty(2, tokens, sizes.q_heads * sizes.head_dim)
        widths = (layer.hidden, layer.weights.qkv.columns, layer.inner)
        inputs = max(layer.hidden, layer.inner, attended.shape[2])
        codes = codes_room(tokens, inputs)
        scales = scales_room(tokens, *(getattr(layer.weights, name) for name in ("qkv", "o", "up", "down")))
        rooms = [x.new_empty(tokens, width) for width in widths]
        return cls(left, residual, attended, (*rooms, codes, scales))


class LayerRoom:
    """The buffers that the layers of a step share, including x and residual (T, hidden).

    Args:
        x: (T, hidden), the input of the first layer.
        layer: one of the layers; the others must have the same sizes.
        places: positions, cache slots and work items of the tokens.
        cache_shape: shape of a cache block.
        state: buffer for partial attention, from `attention_state`; None if attention has one level.
        beside: the LayerRoom of layers with other `places` in the same step. Its tensors are reused if its layers have
            the same sizes and it was made for the same x.

    Raises:
        ValueError: If x or `places` do not match the layer.
    """

    def __init__(
        self,
        x: Tensor,
        layer: PackedLayer,
        places: StepPlaces,
        cache_shape: tuple[int, int, int],
        state: Tensor | None,
        beside: LayerRoom | None = None,
    ) -> None:
        places.check(len(x))
        if x.shape != (len(x), layer.hidden) or x.dtype != layer.dtype:
            raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, expected (T, {layer.hidden}) {layer.dtype}")
        self.places, self.cache_shape = places, cache_shape
        self._layer, self._state = layer, state
        shared = beside is not None and beside.x is x and beside.fits(layer)
        self._tensors: _Tensors = beside._tensors if beside is not None and shared else _Tensors.of(x, layer)
        self.x: Tensor = self._tensors.x
        self.residual: Tensor = self._tensors.residual
        sizes = layer.sizes
        self._plan = places.items.structure(places.block_tables, sizes.q_heads // sizes.kv_heads)
        rooms = (self.x, self.residual, *self._tensors.rooms)
        parts = PartsStructure.of(places.parts)
        self._adapted = None if places.adapted is None else self._room_of_adapters(places.adapted)
        adapted = AdaptedStructure() if self._adapted is None else self._adapted.structure
        self.structure = LayerStep(self._heads(), self._attention(), *map(address, rooms), parts, adapted)

    def holds(self, x: Tensor, residual: Tensor | None) -> bool:
        """Return True if `x` and `residual` are the tensors of this object into which layers write their output.

        A post-norm layer (`norms_sums`) has no residual; `residual` must then be None.
        """
        left = None if self._layer.weights.norms_sums else self.residual
        return x is self.x and residual is left

    def fits(self, layer: PackedLayer) -> bool:
        """Return True if the layer has the same sizes as the layer for which the buffers were made."""
        return layer.key == self._layer.key

    def _room_of_adapters(self, rows: AdaptedRows) -> AdaptedRoom:
        weights = self._layer.weights
        if any(own is not None and own.count + 2 != len(rows.starts) for own in weights.adapters):
            raise ValueError(f"the layer does not have the {len(rows.starts) - 2} adapters of the step")
        inputs, outputs = (
            max(getattr(one, name) for one in weights.linears) for name in ("inputs", "outputs")
        )
        return AdaptedRoom(rows, self._layer.dtype, inputs, self._layer.most_rank, outputs)

    def _heads(self) -> Heads:
        return Heads(
            stride=self._layer.weights.qkv.columns,
            positions=address(self.places.positions),
            slots=address(self.places.slots),
            q_out=address(self._tensors.attended[0]),
            tokens=len(self.x),
            **self._sizes(),
        )

    def _attention(self) -> Attention:
        return Attention(
            q=address(self._tensors.attended[0]),
            plan=ctypes.pointer(self._plan),
            state=address(self._state),
            out=address(self._tensors.attended[1]),
            **scoring(self._layer.sizes.scale, self._layer.sizes.soft_cap),
            **self._sizes(),
        )

    def _sizes(self) -> dict[str, int]:
        sizes, (_, block_pad, dim_pad) = self._layer.sizes, self.cache_shape
        return {
            "q_heads": sizes.q_heads,
            "kv_heads": sizes.kv_heads,
            "dim": sizes.head_dim,
            "dim_pad": dim_pad,
            "block_size": self.places.block_size,
            "block_pad": block_pad,
        }


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is None:
        return
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}")
    check_readable(name, tensor)


def check_readable(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless a tensor is contiguous and on the CPU. `name` is its name in the message."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not contiguous on the CPU")
