"""Allocates the tensors of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from batchinfer.engine.cache_layout import CacheLayout
from batchinfer.models.spec import CacheSpec
from batchinfer.ops.interface import LayerCache, Ops


def block_bytes(ops: Ops, caches: Sequence[CacheSpec], layout: CacheLayout, itemsize: int) -> int:
    """Bytes of one block."""
    return ops.block_bytes(_of_a_block(caches, layout), layout.block_size, itemsize)


def allocate_caches(
    ops: Ops,
    caches: Sequence[CacheSpec],
    layout: CacheLayout,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[LayerCache]:
    """A zero-filled cache for each layer; groups have the same tensors, and different blocks of them."""
    size = layout.block_size
    found = [ops.allocate_cache(cache, blocks, size, dtype, device) for cache in _of_a_block(caches, layout)]
    placed = {
        layer: replace(found[at], group=number)
        for number, group in enumerate(layout.groups)
        for at, layer in enumerate(group.layers)
    }
    return [placed[layer] for layer in range(len(caches))]


def _of_a_block(caches: Sequence[CacheSpec], layout: CacheLayout) -> list[CacheSpec]:
    """What lies in a block: the layers of the largest group, as all of several groups are alike."""
    largest = max(layout.groups, key=lambda group: len(group.layers))
    return [caches[layer] for layer in largest.layers]
