"""Tests that compilations are announced: the driver learns that a launch may take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from triton import knobs
from triton.compiler.errors import CompilationError

from batchinfer_kernels.gpu.compilations import announce_compilations
from batchinfer_kernels.gpu.mask import _mask_kernel
from tests.kernels.gpu.aot import compile_launch


def launch_masks() -> None:
    """Compile kernels. A failed compilation (its tile is no power of two) does not silence the next
    one."""
    said: list[object] = []

    @contextmanager
    def compiling() -> Iterator[None]:
        said.append("compiling")
        yield
        said.append("done")

    def launch(tile: int) -> None:
        said.append(tile)
        logits, rows, bits = torch.empty(2, 64), torch.arange(2), torch.empty(2, 2, dtype=torch.int32)
        _mask_kernel.warmup(logits, 64, 64, rows, bits, 2, TILE=tile, grid=(1,))

    with pytest.MonkeyPatch.context() as patch:
        for hook in ("jit_cache_hook", "jit_post_compile_hook"):
            patch.setattr(knobs.runtime, hook, None)
        announce_compilations(compiling)
        launch(64)
        launch(64)
        with pytest.raises(CompilationError):
            launch(63)
        launch(16)
    both = ["compiling", "done"]
    assert said == [64, *both, 64, 63, "compiling", 16, "done", *both]


def test_each_compilation_is_announced_once() -> None:
    assert len(compile_launch(f"{__name__}:launch_masks", (), "sm_90")) == 3
