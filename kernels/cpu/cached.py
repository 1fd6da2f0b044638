"""The compiled operators that read and write the KV cache, quantised or not."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.copy_parts import check_copy_parts
from batchinfer_kernels.cpu.attention_plan import CachePages, Items
from batchinfer_kernels.cpu.layer import LayerRoom, PackedLayer, check_readable
from batchinfer_kernels.cpu.structures import (
    Attention,
    Cache,
    Heads,
    Layer,
    LayerStep,
    PartsStructure,
    RotationStructure,
    Teams,
    address,
    scoring,
)
from batchinfer_kernels.draft_tree import check_moves
from batchinfer_kernels.paged_attention import ScoreRules, check_attention_extras, check_bias, check_scales
from batchinfer_kernels.rope_store import check_pairs, check_rotary

SUFFIX = {torch.float32: "_f32", torch.bfloat16: "_bf16"}
WORD_BYTES = 4
MAX_HEAD_DIM = 256
Scales = tuple[Tensor, Tensor]  # scales of K and of V in a quantised cache
_LONG, _CACHE = ctypes.c_int64, ctypes.POINTER(Cache)
# Functions that also exist for a quantised cache, in a library that is compiled only if needed
CACHE_SIGNATURES: dict[str, list[Any]] = {
    "rope_store": [ctypes.POINTER(Heads)],
    "copy_parts": [ctypes.POINTER(PartsStructure), _CACHE] + [_LONG] * 3,
    "move_slots": [ctypes.c_void_p, _LONG, _CACHE] + [_LONG] * 4,
    "paged_attention": [ctypes.POINTER(Attention)],
    "teams": [ctypes.POINTER(Teams)],
}
LAYER_SIGNATURES: dict[str, list[Any]] = {
    "decoder_layer": [ctypes.POINTER(Layer), ctypes.POINTER(LayerStep), _CACHE, _LONG],
}
Functions = dict[tuple[str, torch.dtype], Any]


class CachedOperators:
    """The compiled CPU operators that use the KV cache.

    They are loaded from one library for caches that are not quantised, and an optional second one for quantised caches.
    """

    def __init__(
        self, lanes: int, tile: int, library: ctypes.CDLL, codes: ctypes.CDLL | None, functions: Functions
    ) -> None:
        """Look up the C functions of the libraries.

        Args:
            lanes: number of values of a vector register.
            tile: number of keys of an attention tile.
            library: operators for caches that are not quantised.
            codes: operators for quantised caches; None: such caches are not supported.
            functions: C functions of `library` that the caller has looked up, by name and dtype.
        """
        self.lanes, self.tile = lanes, tile
        self._functions = functions | _functions(library, CACHE_SIGNATURES | LAYER_SIGNATURES)
        self._coded = {} if codes is None else _functions(codes, CACHE_SIGNATURES)
        self._teams = {
            (dtype, coded): _teams(of["teams", dtype])
            for coded, of in enumerate((self._functions, self._coded))
            for dtype in SUFFIX
            if of
        }

    @property
    def keeps_codes(self) -> bool:
        """Return True if the operators for a quantised cache are loaded."""
        return bool(self._coded)

    def pages(self, block_size: int) -> CachePages:
        """Return how attention divides a cache with blocks of `block_size` tokens into tiles."""
        return CachePages(block_size, self.lanes, self.tile // self.lanes)

    def cache_shape(self, kv_heads: int, block_size: int, head_dim: int) -> tuple[int, int, int]:
        """Return the shape of a cache block: (kv_heads, tokens, values).

        Tokens and values are `block_size` and `head_dim`, rounded up to the size of a vector register.

        Raises:
            ValueError: If `head_dim` exceeds MAX_HEAD_DIM.
        """
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"a head has {head_dim} values; at most {MAX_HEAD_DIM} are supported")
        return kv_heads, _up(block_size, self.lanes), _up(head_dim, self.lanes)

    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_size: int,
        slots: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        interleaved: bool = False,
        scales: Scales | None = None,
    ) -> Tensor:
        """Rotate q and k by their positions (RoPE), and write k and v to the KV cache.

        The contract is `rope_store_reference`. q, k and v may be slices of one fused tensor; all rows must have the
        same stride, and the heads of a row must be adjacent.

        Args:
            q: (T, q_heads, D).
            k: (T, kv_heads, D).
            v: (T, kv_heads, D).
            cos: (positions, pairs) float32, a table for all positions.
            sin: as `cos`.
            positions: (T,) int64, the position of each token: its row of cos and sin.
            k_cache: (blocks, *cache_shape).
            v_cache: as `k_cache`.
            block_size: number of tokens of a block.
            slots: (T,) int64, block * block_size + offset; negative for padding.
            q_norm: (D,), weight of an RMSNorm of each head before the rotation, or None.
            k_norm: as `q_norm`.
            eps: epsilon of the norms.
            offset: added to the weights of the norms.
            interleaved: which values form a pair; see `rotate_reference`.
            scales: of K and V in a quantised cache, (blocks, *cache_shape[:2]) each; None: it is not quantised.

        Returns:
            The rotated q, (T, q_heads, D).
        """
        tokens, q_heads, dim = q.shape
        check_rotary(q, k, v, cos.shape[1], slots)
        cache = self._cache((k_cache, v_cache), scales, k.shape[1], block_size, q)
        if not (
            q.stride(0) == k.stride(0) == v.stride(0)
            and q.stride(1) == k.stride(1) == v.stride(1) == q.shape[2]
        ):
            raise ValueError(
                f"q, k and v have strides {q.stride()}, {k.stride()}, {v.stride()}; expected equal strides of rows"
            )
        out = q.new_empty(q.shape)
        tables = [array for array in (cos, sin, q_norm, k_norm) if array is not None]
        self._checked("rope_store", positions, slots, *tables)
        norms = (address(q_norm), address(k_norm), eps, offset)
        heads = Heads(
            q=address(q),
            k=address(k),
            v=address(v),
            stride=q.stride(0),
            positions=address(positions),
            slots=address(slots),
            cache=cache,
            q_out=address(out),
            rotation=RotationStructure(address(cos), address(sin), cos.shape[1], interleaved, *norms),
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=k.shape[1],
            dim=dim,
            dim_pad=k_cache.shape[3],
            block_size=block_size,
            block_pad=k_cache.shape[2],
        )
        self._function_of("rope_store", q.dtype, scales is not None)(heads)
        return out

    def rope(
        self,
        q: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        norm: Tensor | None = None,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        interleaved: bool = False,
    ) -> Tensor:
        """Return q rotated by its positions (RoPE), for a layer that reads the K and V of another layer.

        The result has the same bits as that of `rope_store`.

        Args:
            q: (T, q_heads, D).
            cos: (positions, pairs) float32, a table for all positions.
            sin: as `cos`.
            positions: (T,) int64, the position of each token: its row of cos and sin.
            norm: (D,), weight of an RMSNorm of each head before the rotation, or None.
            eps: epsilon of the norm.
            offset: added to the weight of the norm.
            interleaved: which values form a pair; see `rotate_reference`.
        """
        tokens, q_heads, dim = q.shape
        check_pairs(q, cos.shape[1])
        if q.stride()[1:] != (dim, 1) or dim > MAX_HEAD_DIM or positions.shape != (tokens,):
            raise ValueError(
                f"q is {tuple(q.shape)}, with strides {q.stride()} and {tuple(positions.shape)} positions"
            )
        out = q.new_empty(q.shape)
        self._checked("rope", positions, out, *(t for t in (cos, sin, norm) if t is not None))
        norms = (address(norm), None, eps, offset)
        heads = Heads(
            q=q.data_ptr(),
            stride=q.stride(0),
            positions=positions.data_ptr(),
            q_out=out.data_ptr(),
            rotation=RotationStructure(address(cos), address(sin), cos.shape[1], interleaved, *norms),
            tokens=tokens,
            q_heads=q_heads,
            dim=dim,
        )
        self._call("rope_store", q, heads)
        return out

    def copy_parts(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        parts: Tensor,
        scales: Scales | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy K and V at the offsets [first, end) of one block to the same offsets of another block, in place.

        Args:
            k_cache: (blocks, *cache_shape).
            v_cache: as `k_cache`; may be the same tensor.
            parts: (n, 4) int64, one copy per row: source block, target block, first offset, end offset.
            scales: scales of K and V in a quantised cache; None: the cache is not quantised.
            dtype: dtype of activations, which determines the layout of a quantised cache; None if it is not quantised.
        """
        check_copy_parts(k_cache, v_cache, parts)
        self._checked("copy_parts", parts)
        _, kv_heads, places, width = k_cache.shape
        if places % self.lanes or width % self.lanes:
            raise ValueError(f"blocks of {(places, width)} are not multiples of the vector size {self.lanes}")
        cache = self._structure((k_cache, v_cache), scales)
        of = k_cache.dtype if scales is None or dtype is None else dtype
        run = self._function_of("copy_parts", of, scales is not None)
        run(PartsStructure.of(parts), cache, kv_heads, width, places)

    def move_slots(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        block_size: int,
        moves: Tensor,
        scales: Scales | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy the K and V of some slots of the cache to other slots, in place, as `move_slots_reference` does.

        Args:
            k_cache: (blocks, *cache_shape).
            v_cache: as `k_cache`; may be the same tensor.
            block_size: number of tokens of a block.
            moves: (n, 2) int64, source and target slot, each block * block_size + offset.
            scales: scales of K and V in a quantised cache; None: the cache is not quantised.
            dtype: dtype of activations, which determines the layout of a quantised cache; None if it is not quantised.
        """
        check_moves(k_cache, v_cache, moves)
        self._checked("move_slots", moves)
        _, kv_heads, places, width = k_cache.shape
        if places != _up(block_size, self.lanes) or width % self.lanes:
            raise ValueError(f"blocks of {(places, width)} do not match a block size of {block_size}")
        cache = self._structure((k_cache, v_cache), scales)
        of = k_cache.dtype if scales is None or dtype is None else dtype
        run = self._function_of("move_slots", of, scales is not None)
        run(moves.data_ptr(), len(moves), cache, kv_heads, width, block_size, places)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_size: int,
        block_tables: Tensor,
        items: Items,
        rules: ScoreRules,
        *,
        scales: Scales | None = None,
    ) -> Tensor:
        """Compute attention over a paged KV cache, as `paged_attention_reference` does: (T, q_heads, D).

        Args:
            q: (T, q_heads, D), the queries of all sequences.
            k_cache: (blocks, *cache_shape).
            v_cache: as `k_cache`.
            block_size: number of tokens of a block.
            block_tables: (sequences, blocks) int32.
            items: work items from `attention_items`, planned for these tables with `pages(block_size)`; or from
                `whole_items` for bidirectional attention.
            rules: scale, window, cap, sinks (float32) and bias of the scores.
            scales: of K and V in a quantised cache, (blocks, *cache_shape[:2]) each; None: it is not quantised.
        """
        (tokens, q_heads, dim), sinks, bias = q.shape, rules.sinks, rules.bias
        kv_heads = k_cache.shape[1]
        cache = self._cache((k_cache, v_cache), scales, kv_heads, block_size, q)
        if q_heads % kv_heads or block_tables.dim() != 2:
            raise ValueError(
                f"{q_heads} query heads, {kv_heads} KV heads, tables {tuple(block_tables.shape)}"
            )
        check_attention_extras(q, k_cache, sinks, *(scales or (None, None)))
        if sinks is not None and sinks.dtype != torch.float32:
            raise ValueError(f"sinks are {sinks.dtype}, not float32")
        self._checked("paged_attention", q, block_tables, *([] if sinks is None else [sinks]))
        out, width = torch.empty_like(q), k_cache.shape[3]
        added = None if bias is None else self._added(bias, q_heads, rules.scale)
        state = self.attention_state(items, tokens, q_heads, width)
        plan = items.structure(block_tables, q_heads // kv_heads)
        attention = Attention(
            q=address(q),
            cache=cache,
            plan=ctypes.pointer(plan),
            state=address(state),
            out=address(out),
            q_heads=q_heads,
            kv_heads=kv_heads,
            dim=dim,
            dim_pad=width,
            block_size=block_size,
            block_pad=k_cache.shape[2],
            window=rules.window or 0,
            sinks=address(sinks),
            bias=address(added),
            bias_width=0 if added is None else added.shape[1],
            bias_reach=0 if bias is None else bias.shape[1] // 2,
            **scoring(rules.scale, rules.soft_cap),
        )
        self._function_of("paged_attention", q.dtype, scales is not None)(attention)
        return out

    def _added(self, bias: Tensor, q_heads: int, scale: float) -> Tensor:
        # C code adds the bias before it scales the scores
        check_bias(bias, q_heads)
        return F.pad(bias.float() / scale, (0, self.lanes))

    def attention_state(self, items: Items, tokens: int, q_heads: int, width: int) -> Tensor | None:
        """Return a buffer that keeps each query's partial attention from one level of `items` to the next.

        The result is None if there is only one level.

        Args:
            items: the work items of attention.
            tokens: number of query tokens of the step.
            q_heads: number of query heads.
            width: number of values of a cached head, padding included.
        """
        if items.levels == 1:
            return None
        return torch.empty(tokens, q_heads, width + self.lanes + 1, dtype=torch.float32)

    def decoder_layer(
        self,
        layer: PackedLayer,
        room: LayerRoom,
        k_cache: Tensor,
        v_cache: Tensor,
        first: bool,
        scales: Scales | None = None,
    ) -> None:
        """Run a whole decoder layer in one call, with the same bits as its operators one by one.

        Args:
            layer: the layer's weights.
            room: buffers of the step. The layer reads x and the residual in them, and overwrites both with its output.
            k_cache: (blocks, *cache_shape).
            v_cache: as `k_cache`.
            first: True for the first layer, where x equals the residual.
            scales: scales of K and V in a quantised cache; None: the cache is not quantised.
        """
        if not room.fits(layer):
            raise ValueError(
                f"the room does not match a layer of {layer.sizes}, {layer.hidden} x {layer.inner}"
            )
        for kept in (k_cache, v_cache):
            _check_blocks(kept, room.cache_shape, room.x.dtype if scales is None else torch.int8)
        cache = self._structure((k_cache, v_cache), scales)
        room.structure.teams = self._teams[layer.dtype, scales is not None]
        self._functions["decoder_layer", layer.dtype](layer.structure, room.structure, cache, first)

    def _cache(
        self,
        caches: tuple[Tensor, Tensor],
        scales: Scales | None,
        kv_heads: int,
        block_size: int,
        q: Tensor,
    ) -> Cache:
        if q.shape[2] * q.element_size() % WORD_BYTES:
            raise ValueError(
                f"heads of {q.shape[2]} values of {q.dtype} are not whole words of {WORD_BYTES} bytes"
            )
        wanted = self.cache_shape(kv_heads, block_size, q.shape[2])
        for cache in caches:
            _check_blocks(cache, wanted, q.dtype if scales is None else torch.int8)
        return self._structure(caches, scales)

    def _structure(self, caches: tuple[Tensor, Tensor], scales: Scales | None) -> Cache:
        k_scale, v_scale = scales or (None, None)
        check_scales(caches[0], k_scale, v_scale)
        self._checked("a cache", *caches, *(scales or ()))
        return Cache(*map(address, caches), address(k_scale), address(v_scale))

    def _function_of(self, name: str, dtype: torch.dtype, coded: bool = False) -> Any:
        functions = self._coded if coded else self._functions
        if coded and not functions:
            raise ValueError(f"{name}: the operators for a quantised cache are not loaded")
        if (name, dtype) not in functions:
            raise ValueError(f"{name}: {dtype} is not supported; use {' or '.join(map(str, SUFFIX))}")
        return functions[name, dtype]

    def _call(self, name: str, like: Tensor, *arguments: Tensor | ctypes.Structure | float | None) -> None:
        self._checked(name, *(argument for argument in arguments if isinstance(argument, Tensor)))
        function = self._function_of(name, like.dtype)
        function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

    def _checked(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            check_readable(f"{name}: a tensor", tensor)


def _functions(library: ctypes.CDLL, signatures: dict[str, list[Any]]) -> Functions:
    return {
        (name, dtype): function_of(library, name + suffix, arguments)
        for name, arguments in signatures.items()
        for dtype, suffix in SUFFIX.items()
    }


def _teams(fill: Any) -> Teams:
    teams = Teams()
    fill(teams)
    return teams


def function_of(library: ctypes.CDLL, name: str, arguments: list[Any], result: Any = None) -> Any:
    """Look up a function in a library, and set the ctypes types of its arguments and its result."""
    function = library[name]
    function.argtypes, function.restype = arguments, result
    return function


def _check_blocks(cache: Tensor, wanted: tuple[int, int, int], dtype: torch.dtype) -> None:
    if cache.shape[1:] != wanted or cache.dtype != dtype:
        blocks = f"{tuple(cache.shape[1:])} of {cache.dtype}"
        raise ValueError(f"the cache's blocks are {blocks}, expected {wanted} of {dtype}")


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
