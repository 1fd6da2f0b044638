"""Allocates the tensors of the KV cache."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.spec import Caches, CacheSpec


def block_bytes(ops: Ops, caches: Caches, layout: CacheLayout, itemsize: int) -> int:
    """Count the bytes of one block."""
    return ops.block_bytes(_of_a_block(caches, layout), layout.block_size, itemsize)


def allocate_caches(
    ops: Ops,
    caches: Caches,
    layout: CacheLayout,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[LayerCache]:
    """Allocate a zero-filled cache for each layer with attention: its own, or that of the layer whose K and V it reads.
    Groups have the same tensors, and different blocks of them."""
    size = layout.block_size
    found = [ops.allocate_cache(cache, blocks, size, dtype, device) for cache in _of_a_block(caches, layout)]
    placed = {
        layer: replace(found[at], group=number)
        for number, group in enumerate(layout.groups)
        for at, layer in enumerate(group.layers)
    }
    read = ((layer, cache.shared) for layer, cache in enumerate(caches) if cache is not None)
    return [placed[layer if shared is None else shared] for layer, shared in read]


def _of_a_block(caches: Caches, layout: CacheLayout) -> list[CacheSpec]:
    """List what lies in a block: the layers of the largest group, as all of several groups are alike."""
    largest = max(layout.groups, key=lambda group: len(group.layers))
    return [cache for layer in largest.layers if (cache := caches[layer]) is not None]
