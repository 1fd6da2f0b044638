"""Tests that ranges of files are read like safetensors does, with limited read-ahead, and that a truncated file is
noticed."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open

from batchinfer.models.checkpoint import file_segment, read_ahead
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.file_segment import segment_of
from batchinfer.models.checkpoint.read_ahead import THREAD, ByteRange, ReadAhead
from batchinfer.models.checkpoint.stored_parts import StoredPart, StoredParts
from batchinfer.models.checkpoint.weights import CheckpointWeights, segments_of
from batchinfer.models.parallel.shard import WHOLE_MODEL
from batchinfer_kernels.cpu.memory import ReusedPages
from tests.checkpoints import FAMILIES, make_checkpoint


def _parts(checkpoint: Checkpoint) -> list[StoredPart]:
    parts = StoredParts(checkpoint, WHOLE_MODEL)
    layers = [parts.layer(index) for index in range(len(checkpoint.spec.layers))]
    return [part for each in (parts.tables(), *layers) for part in each.values()]


@pytest.mark.sample(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_range_equals_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(file_segment, "PIECE_BYTES", 1000)
    make_checkpoint(tmp_path, family, shards=2)
    checkpoint, pages, read = inspect_checkpoint(tmp_path), ReusedPages(), 0
    for part in _parts(checkpoint):
        found = segment_of(checkpoint.tensors, part)
        if found is None:
            continue
        with safe_open(str(found.file), "pt") as file:
            wanted = segments_of(file.get_tensor(part.stored.tensor), part.stored).flatten(0, 1)
        for dtype in (wanted.dtype, torch.bfloat16):
            given = torch.full(found.shape, torch.nan, dtype=dtype)
            found.read(given, pages)
            assert torch.equal(given, wanted.to(dtype))
        read += 1
    assert read > 4


def test_a_file_that_was_truncated_while_loading_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = inspect_checkpoint(tmp_path)
    (path,) = checkpoint.files
    os.truncate(path, path.stat().st_size - 1)
    weights = CheckpointWeights(checkpoint, torch.float32, "cpu")
    with pytest.raises(OSError, match=f"ends before its tensors do.*{path.name}"):
        [weights.tables(), *map(weights.layer, range(len(checkpoint.spec.layers)))]


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == THREAD]


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[ByteRange]:
    """Return a list that receives ranges instead of reading them ahead."""
    found: list[ByteRange] = []
    monkeypatch.setattr(ReadAhead, "_read_range", lambda _, wanted, index: found.append(wanted))
    return found


def _bytes(ranges: list[ByteRange]) -> int:
    return sum(each.end - each.start for each in ranges)


def test_all_tensors_are_read_and_nothing_outside(tmp_path: Path, read: list[ByteRange]) -> None:
    make_checkpoint(tmp_path, "qwen2", shards=3)
    checkpoint = inspect_checkpoint(tmp_path)
    whole = sum(each.info.nbytes for each in checkpoint.tensors.values())
    with CheckpointWeights(checkpoint, torch.float32, "cpu") as weights:
        weights.tables()
        for index in range(len(checkpoint.spec.layers)):
            weights.layer(index)
        _until(lambda: _bytes(read) == whole)
    assert _threads() == []
    in_order = sorted(read, key=lambda each: (each.file, each.start))
    assert all(a.file != b.file or a.end <= b.start for a, b in pairwise(in_order))
    for file in checkpoint.files:  # offsets count from where the header ends
        assert max(each.end for each in read if each.file == file) == file.stat().st_size


class CountedFile:
    """A file that counts read bytes, and calls `then` after each read."""

    def __init__(self, size: int, then: Callable[[], None] = lambda: None) -> None:
        self.taken: list[tuple[int, int]] = []
        self._size, self._then = size, then

    def open(self, mode: str, buffering: int) -> Any:
        assert (mode, buffering) == ("rb", 0)
        counted = self

        class Opened(io.BytesIO):
            def readinto(self, room: Any) -> int:
                at, found = self.tell(), super().readinto(room)
                counted.taken.append((at, found))
                counted._then()
                return found

        return Opened(bytes(self._size))


def test_a_range_is_read_until_the_next_one_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 100)
    ahead = ReadAhead(inspect_checkpoint(tmp_path))
    file = CountedFile(1000)
    ahead._read_range(ByteRange(cast(Path, file), 50, 275), 0)
    assert file.taken == [(50, 100), (150, 100), (250, 25)]
    for end in (lambda: ahead.layer(1), ahead.close):
        file = CountedFile(1000, end)
        ahead._read_range(ByteRange(cast(Path, file), 0, 1000), 0)
        assert len(file.taken) == 1
        ahead.layer(0)


def test_no_thread_is_left_when_loading_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    weights, begun = CheckpointWeights(inspect_checkpoint(tmp_path), torch.float32, "cpu"), threading.Event()
    slow = threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        slow.wait(0.05)

    def fail() -> None:
        with weights:
            weights.tables()
            assert begun.wait(10)
            raise RuntimeError("packing failed")

    monkeypatch.setattr(ReadAhead, "_read_range", wait)
    with pytest.raises(RuntimeError, match="packing failed"):
        fail()
    assert _threads() == []


def test_read_ahead_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[ByteRange]
) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = inspect_checkpoint(tmp_path)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1)
    ahead = ReadAhead(checkpoint)
    layer = sum(each.end - each.start for each in ahead.ranges(0))
    whole = sum(each.info.nbytes for each in checkpoint.tensors.values())
    tables, count = whole - 2 * layer, len(checkpoint.spec.layers)
    assert count == 2
    ahead.tables()
    _until(lambda: _bytes(read) == tables + layer)  # a layer is always read
    time.sleep(0.05)
    assert _bytes(read) == tables + layer
    ahead.layer(0)
    _until(lambda: _bytes(read) == whole)
    ahead.close()
    assert _threads() == []
