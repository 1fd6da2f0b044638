"""What is read of a stretch of a file is what safetensors gives, for every family; a file that was cut is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from batchinfer.models.checkpoint import stretch
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.stored_parts import StoredPart, StoredParts
from batchinfer.models.checkpoint.stretch import stretch_of
from batchinfer.models.checkpoint.weights import CheckpointWeights, stretches_of
from batchinfer.models.parallel.place import EVERYTHING
from batchinfer_kernels.cpu.memory import ReusedPages
from tests.checkpoints import FAMILIES, make_checkpoint


def _parts(checkpoint: Checkpoint) -> list[StoredPart]:
    parts = StoredParts(checkpoint, EVERYTHING)
    layers = [parts.layer(index) for index in range(len(checkpoint.spec.layers))]
    return [part for each in (parts.tables(), *layers) for part in each.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stretch_is_what_safetensors_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(stretch, "PIECE_BYTES", 1000)
    make_checkpoint(tmp_path, family, shards=2)
    checkpoint, pages, read = inspect_checkpoint(tmp_path), ReusedPages(), 0
    for part in _parts(checkpoint):
        found = stretch_of(checkpoint.tensors, part)
        if found is None:
            continue
        with safe_open(str(found.file), "pt") as file:
            wanted = stretches_of(file.get_tensor(part.stored.tensor), part.stored).flatten(0, 1)
        for dtype in (wanted.dtype, torch.bfloat16):
            given = torch.full(found.shape, torch.nan, dtype=dtype)
            found.read(given, pages)
            assert torch.equal(given, wanted.to(dtype))
        read += 1
    assert read > 4


def test_a_file_that_was_cut_meanwhile_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = inspect_checkpoint(tmp_path)
    (path,) = checkpoint.files
    os.truncate(path, path.stat().st_size - 1)
    weights = CheckpointWeights(checkpoint, torch.float32, "cpu")
    with pytest.raises(OSError, match=f"ends before its tensors do.*{path.name}"):
        [weights.tables(), *map(weights.layer, range(len(checkpoint.spec.layers)))]
