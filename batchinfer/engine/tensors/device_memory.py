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
    """Return a context that converts all errors about exhausted device memory to torch.OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    # The driver, Triton and CUDA libraries raise other types. During a capture, the error may be only the
    # cause of another
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or an error that caused it, is about exhausted memory.

    Args:
        error: The error. All its causes and contexts are checked, too.
    """
    return any(map(_says_so, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_so(error: BaseException) -> bool:
    is_torch = isinstance(error, torch.OutOfMemoryError)
    return is_torch or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)  # the latter by cuBLAS


def block_bytes(ops: Ops, caches: Caches, layout: CacheLayout, itemsize: int) -> int:
    """Return the number of bytes of one KV cache block.

    Args:
        ops: The operators, which may round up sizes.
        caches: The cache of each layer, or None for layers without attention.
        layout: The layout of the KV cache.
        itemsize: The number of bytes per value of the model's dtype.
    """
    return ops.block_bytes(_of_a_block(caches, layout), layout.block_size, itemsize)


def allocate_caches(
    ops: Ops,
    caches: Caches,
    layout: CacheLayout,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[LayerCache]:
    """Allocate the KV cache, and return the cache of each layer with attention.

    A layer that shares the keys and values of another layer gets the same cache object. All cache groups have the same
    tensors but use different blocks of them.

    Args:
        ops: The operators, which allocate zero-filled tensors.
        caches: The cache of each layer, or None for layers without attention.
        layout: The layout of the KV cache.
        blocks: The number of blocks.
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
    largest = max(layout.groups, key=lambda group: len(group.layers))
    return [cache for layer in largest.layers if (cache := caches[layer]) is not None]
