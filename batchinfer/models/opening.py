"""Opens a checkpoint folder or a GGUF model, whoever's code computes what it holds. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from batchinfer.core.gguf.files import read_gguf
from batchinfer.models.checkpoint.checkpoint import Checkpoint, config_folder, inspect_checkpoint
from batchinfer.models.checkpoint.config import known_types
from batchinfer.models.files.config_fields import load_json_object
from batchinfer.models.foreign.checkpoint import (
    Describe,
    ForeignCheckpoint,
    describe_in_child,
    inspect_foreign,
)
from batchinfer.models.gguf.inspecting import inspect_gguf

# A checkpoint folder that passed every check
StoredModel: TypeAlias = Checkpoint | ForeignCheckpoint


def open_checkpoint(path: Path, describe: Describe = describe_in_child) -> StoredModel:
    """Check a checkpoint folder, or a GGUF model in a folder or a file, without loading it. `describe` finds out what a
    model is that none of our families covers; by default in a process of its own.

    Raises SecurityRefusal or JobFileError, with the reason, for what cannot be run.
    """
    gguf = read_gguf(path)
    if gguf is not None:
        return inspect_gguf(gguf)
    folder = config_folder(path)
    kind = load_json_object(folder.path / "config.json").get("model_type")
    if isinstance(kind, str) and kind not in known_types():
        return inspect_foreign(path, describe)
    return inspect_checkpoint(path)
