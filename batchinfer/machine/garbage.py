"""Keeps Python's garbage collector from scanning libraries again and again, and from working inside captures."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded_for_good() -> Iterator[None]:
    """Inside the context, the collector scans only objects that were made since it was entered.

    A model's libraries make some hundred thousand objects; passing over them took 1 % of a run of small steps.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def not_collecting() -> Iterator[None]:
    """Inside the context, nothing is collected: what a collector finds at some point of a capture of CUDA work, such as
    a kernel that nobody calls any more, is unloaded from the device, which no capture survives."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
