"""Allocates the tensors of the KV cache, and tells a lack of a device's memory from other errors."""

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
def lack_of_memory() -> Iterator[None]:
    """Raises torch.OutOfMemoryError for every error inside that comes of a lack of memory: the driver, Triton and the
    libraries have errors of their own for it, and that of a capture that was cut short hides it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error comes of a lack of memory, be it by those in whose handling it came up."""
    return any(map(_says_so, _chain(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those in whose handling it came up."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _says_so(error: BaseException) -> bool:
    """Whether the error says that memory is out: cuBLAS by CUBLAS_STATUS_ALLOC_FAILED, the others in words."""
    known = isinstance(error, torch.OutOfMemoryError)
    return known or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)


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
