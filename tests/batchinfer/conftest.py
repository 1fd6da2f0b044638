"""What tests of whole commands share: a checkpoint that every job may name, and a place with a job that is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batchinfer.wrong_jobs import Place, make_place
from tests.checkpoints import make_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; tests change copies of it only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    """A folder of its own with a job, an input of a few rows and a link to the model."""
    return make_place(tmp_path / "job", model)
