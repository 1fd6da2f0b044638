"""Reading ahead asks for the bytes of all tensors and no others, and ends with the loading, also where that fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.read_ahead import PIECE_BYTES, THREAD
from batchinfer.models.checkpoint.weights import CheckpointWeights
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system reads nothing ahead")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def test_all_tensors_are_asked_for_and_nothing_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen2", shards=3)
    checkpoint, asked = inspect_checkpoint(tmp_path), list[tuple[Path, int, int]]()

    def record(file: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert 0 < size <= PIECE_BYTES
        assert start + size <= os.fstat(file).st_size
        asked.append((Path(os.readlink(f"/proc/self/fd/{file}")), start, size))

    monkeypatch.setattr(os, "posix_fadvise", record)
    with CheckpointWeights(checkpoint, torch.float32, "cpu") as weights:
        weights.tables()
        for index in range(len(checkpoint.spec.layers)):
            weights.layer(index)
    assert _threads() == []
    # Each byte of a tensor once
    assert sum(size for *_, size in asked) == sum(each.info.nbytes for each in checkpoint.tensors.values())
    for (file, start, size), (after, other, _) in zip(sorted(asked), sorted(asked)[1:], strict=False):
        assert file != after or start + size <= other
    for file in checkpoint.files:
        last = max(start + size for path, start, size in asked if path == file)
        assert last == file.stat().st_size  # offsets count from where the header ends


def test_no_thread_is_left_when_loading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    weights, begun = CheckpointWeights(inspect_checkpoint(tmp_path), torch.float32, "cpu"), threading.Event()
    slow = threading.Event()

    def wait(*_: int) -> None:
        begun.set()
        slow.wait(0.05)

    def fail() -> None:
        with weights:
            weights.tables()
            assert begun.wait(10)
            raise RuntimeError("packing failed")

    monkeypatch.setattr(os, "posix_fadvise", wait)
    with pytest.raises(RuntimeError, match="packing failed"):
        fail()
    assert _threads() == []
