"""The checkpoint that these tests' jobs name."""

from __future__ import annotations

import pytest

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint") / "m"
    make_checkpoint(folder, "llama")
    return inspect_checkpoint(folder)
