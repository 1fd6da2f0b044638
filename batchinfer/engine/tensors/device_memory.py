"""Allocates the KV cache, and recognises errors about exhausted memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.spec import Caches, CacheSpec


@contextmanager
def out_of_memory_errors() -> Iterator[None]:
    """Convert any error about exhausted device memory inside of the context to torch.OutOfMemoryError.

    The driver, Triton and CUDA libraries raise errors of their own. An error that ends a capture may hide it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or an error in its chain of causes and contexts, is about exhausted memory."""
    return any(map(_says_so, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes and contexts."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_so(error: BaseException) -> bool:
    is_torch = isinstance(error, torch.OutOfMemoryError)
    return is_torch or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)  # the latter by cuBLAS


def block_bytes(ops: Ops, caches: Caches, layout: CacheLayout, itemsize: int) -> int:
    """Return the bytes of one block."""
    return ops.block_bytes(_of_a_block(caches, layout), layout.block_size, itemsize)


def allocate_caches(
    ops: Ops,
    caches: Caches,
    layout: CacheLayout,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[LayerCache]:
    """Return a cache for each attention layer. Layers that read the K and V of another layer share its cache.

    Cache groups share the tensors and use different blocks of them.

    Args:
        ops: The operators, which allocate zero-filled caches.
        caches: The cache of each layer; None for layers without attention.
        layout: The cache groups.
        blocks: Number of blocks.
        dtype: The dtype of the model.
        device: The device of the tensors.
    """
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
    """Return the caches that a block holds: of the layers of the largest group. All layers of the groups are alike."""
    largest = max(layout.groups, key=lambda group: len(group.layers))
    return [cache for layer in largest.layers if (cache := caches[layer]) is not None]
