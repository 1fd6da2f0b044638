"""Controls Python's garbage collector, to save time and to protect CUDA graph captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Return a context manager in which Python's garbage collector ignores the objects that exist at its start."""
    # The libraries of a model create several hundred thousand objects. Scanning them took 1 % of the time of a run with
    # small steps
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def pause_garbage_collector() -> Iterator[None]:
    """Return a context manager in which Python's garbage collector is disabled, for the capture of a CUDA graph."""
    # Collecting an unused CUDA kernel unloads it, which invalidates the capture
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
