"""Reading ahead asks for the bytes of all tensors and no others, and ends with the loading, also where that fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchinfer.models.checkpoint import read_ahead
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.read_ahead import PIECE_BYTES, THREAD
from batchinfer.models.checkpoint.weights import CheckpointWeights
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system reads nothing ahead")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


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
    whole = sum(each.info.nbytes for each in checkpoint.tensors.values())
    with CheckpointWeights(checkpoint, torch.float32, "cpu") as weights:
        weights.tables()
        for index in range(len(checkpoint.spec.layers)):
            weights.layer(index)
        _until(lambda: sum(size for *_, size in asked) == whole)
    assert _threads() == []
    # Each byte of a tensor once
    assert sum(size for *_, size in asked) == whole
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


def test_no_more_is_asked_for_than_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint, asked = inspect_checkpoint(tmp_path), list[int]()
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, _start, size, _advice: asked.append(size))
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1)
    ahead = read_ahead.ReadAhead(checkpoint)
    layer = sum(each.end - each.start for each in ahead.ranges(0))
    whole = sum(each.info.nbytes for each in checkpoint.tensors.values())
    tables, count = whole - 2 * layer, len(checkpoint.spec.layers)
    assert count == 2
    ahead.tables()
    _until(lambda: sum(asked) == tables + layer)  # a layer is always read
    time.sleep(0.05)
    assert sum(asked) == tables + layer
    ahead.layer(0)
    _until(lambda: sum(asked) == whole)
    ahead.close()
    assert _threads() == []
