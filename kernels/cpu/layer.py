"""A decoder layer that runs as one call, and the room that its step's layers share."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from batchinfer_kernels.cpu.attention_plan import Items
from batchinfer_kernels.cpu.packed import PackedWeight
from batchinfer_kernels.cpu.structures import LOG2_E, Attention, Heads, Layer, LayerStep, Weight, address


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What all layers of a model have in common. `scale` is attention's, `eps` every norm's."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's weights, packed: `gated` of kind "gated", the others "plain"."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedWeight
    o: PackedWeight
    gated: PackedWeight
    down: PackedWeight
    window: int | None


class PackedLayer:
    """A layer whose weights are packed. Raises ValueError where they do not fit one another."""

    def __init__(self, weights: LayerWeights, sizes: LayerSizes) -> None:
        if sizes.q_heads % sizes.kv_heads:
            raise ValueError(f"{sizes.q_heads} query heads do not divide among {sizes.kv_heads} KV heads")
        self.weights, self.sizes = weights, sizes
        self.hidden, self.inner = weights.qkv.inputs, weights.gated.columns
        self.dtype = weights.input_norm.dtype
        self.key = (*astuple(sizes), self.hidden, self.inner)  # layers with the same one may share a room
        self._check_linears()
        self._check_norms()
        norms = (weights.input_norm, weights.post_norm, weights.q_norm, weights.k_norm)
        self.structure = Layer(
            *(address(norm) for norm in norms),
            *(
                Weight.from_buffer_copy(w.structure)
                for w in (weights.qkv, weights.o, weights.gated, weights.down)
            ),
            weights.window or 0,
        )

    def _check_linears(self) -> None:
        sizes, weights = self.sizes, self.weights
        heads, attended = sizes.q_heads + 2 * sizes.kv_heads, sizes.q_heads * sizes.head_dim
        wanted = {
            "qkv": (heads * sizes.head_dim, self.hidden),
            "o": (self.hidden, attended),
            "gated": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        for name, shape in wanted.items():
            weight: PackedWeight = getattr(weights, name)
            if (weight.columns, weight.inputs) != shape:
                raise ValueError(f"{name} is {(weight.columns, weight.inputs)}, wanted {shape}")
            if weight.dtype not in (None, self.dtype):
                raise ValueError(f"{name} is of {weight.dtype}, the norms of {self.dtype}")

    def _check_norms(self) -> None:
        widths = {"input_norm": self.hidden, "post_norm": self.hidden}
        widths |= {"q_norm": self.sizes.head_dim, "k_norm": self.sizes.head_dim}
        for name, width in widths.items():
            norm: Tensor | None = getattr(self.weights, name)
            if norm is None:
                continue
            if norm.shape != (width,) or norm.dtype != self.dtype:
                shape = f"{tuple(norm.shape)} of {norm.dtype}"
                raise ValueError(f"{name} is {shape}, wanted ({width},) of {self.dtype}")
            check_readable(name, norm)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlaces:
    """Where the T tokens of a step stand; shapes as for `rope_store` and `paged_attention`."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    items: Items
    block_size: int

    def check(self, tokens: int, head_dim: int) -> None:
        """Raises ValueError for tensors that the operators could not read, or that are not of such a step."""
        if not 0 < 2 * self.cos.shape[1] <= head_dim:
            raise ValueError(f"{self.cos.shape[1]} pairs are rotated in heads of {head_dim}")
        wanted = {
            "cos": ((len(self.cos), self.cos.shape[1]), torch.float32),
            "sin": (tuple(self.cos.shape), torch.float32),
            "positions": ((tokens,), torch.int64),
            "slots": ((tokens,), torch.int64),
            "block_tables": (tuple(self.block_tables.shape[:2]), torch.int32),
        }
        for name, (shape, dtype) in wanted.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != shape or tensor.dtype != dtype:
                found = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ValueError(f"{name} is {found}, wanted {shape} of {dtype}")
            check_readable(name, tensor)


class LayerRoom:
    """What the layers of a step share: x and residual (T, hidden), and room to work in.

    `cache_shape` is that of a block of the cache, `state` what `attention_state` gives.
    """

    def __init__(
        self,
        x: Tensor,
        layer: PackedLayer,
        places: StepPlaces,
        cache_shape: tuple[int, int, int],
        state: Tensor | None,
    ) -> None:
        places.check(len(x), layer.sizes.head_dim)
        if x.shape != (len(x), layer.hidden) or x.dtype != layer.dtype:
            raise ValueError(
                f"x is {tuple(x.shape)} of {x.dtype}, wanted (T, {layer.hidden}) of {layer.dtype}"
            )
        self.x, self.residual = (x.clone(memory_format=torch.contiguous_format) for _ in range(2))
        self.places, self.cache_shape = places, cache_shape
        self._layer, self._state = layer, state
        tokens, sizes = len(x), layer.sizes
        # rotated q, and what attention makes of it
        self._attended = x.new_empty(2, tokens, sizes.q_heads * sizes.head_dim)
        widths = (layer.hidden, layer.weights.qkv.columns, layer.inner)
        self._rooms = [x.new_empty(tokens, width) for width in widths]
        inputs = max(layer.hidden, layer.inner, self._attended.shape[2])
        self._codes = torch.empty(tokens, inputs + 3, dtype=torch.uint8)
        self._scales = torch.empty(tokens, dtype=torch.float32)
        self._plan = places.items.structure(places.block_tables, sizes.q_heads // sizes.kv_heads)
        rooms = (self.x, self.residual, *self._rooms, self._codes, self._scales)
        self.structure = LayerStep(self._heads(), self._attention(), *(address(room) for room in rooms))

    def fits(self, layer: PackedLayer) -> bool:
        """Whether a layer has the sizes that this room was made for."""
        return layer.key == self._layer.key

    def _heads(self) -> Heads:
        places, sizes = self.places, self._layer.sizes
        tables = (address(t) for t in (places.cos, places.sin, places.positions, places.slots))
        return Heads(
            stride=self._layer.weights.qkv.columns,
            **dict(zip(("cosine", "sine", "positions", "slots"), tables, strict=True)),
            q_out=address(self._attended[0]),
            eps=sizes.eps,
            tokens=len(self.x),
            pairs=places.cos.shape[1],
            **self._sizes(),
        )

    def _attention(self) -> Attention:
        return Attention(
            q=address(self._attended[0]),
            plan=ctypes.pointer(self._plan),
            state=address(self._state),
            out=address(self._attended[1]),
            scale=self._layer.sizes.scale * LOG2_E,
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


def check_readable(name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous in the CPU's memory."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} is not contiguous on the CPU")
