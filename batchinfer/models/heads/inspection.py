"""Detects the kind of draft heads in a folder, and checks them against their model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.files.config_fields import load_json_object
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.heads.stored_eagle import inspect_eagle
from batchinfer.models.heads.stored_heads import CONFIG, StoredHeads, heads_error
from batchinfer.models.heads.stored_medusa import PICKLED, WEIGHTS, inspect_medusa
from batchinfer.models.heads.stored_mtp import inspect_mtp


def inspect_heads(path: Path, checkpoint: Checkpoint) -> StoredHeads:
    """Detect the kind of draft heads in a folder, and check that they fit a target model, without loading them.

    Args:
        path: The folder of the draft heads. If it is the folder of the target model, its MTP layer is used.
        checkpoint: The target model.

    Raises:
        JobFileError: Something is missing, or does not fit the model.
        SecurityRefusal: A path leaves the folder, or a file is malformed.
    """
    if not path.is_dir():
        raise heads_error(path, f"{path} is {'a file' if path.exists() else 'missing'}; a folder is needed")
    folder = CheckpointFolder(path)
    config = folder.file(CONFIG)
    if config is None:
        raise heads_error(path, f"{path} has no {CONFIG}: a folder of heads is needed")
    if folder.path == checkpoint.path.resolve():
        return inspect_mtp(checkpoint)
    raw = load_json_object(config)
    if "medusa_num_heads" in raw or any(folder.file(name) is not None for name in (WEIGHTS, PICKLED)):
        return inspect_medusa(folder, checkpoint)
    if _is_eagle(raw):
        return inspect_eagle(folder, checkpoint)
    keys = "neither medusa_num_heads, nor draft_vocab_size, which EAGLE-3 heads have"
    raise heads_error(path, f"{path} has heads of an unknown kind: {CONFIG} has {keys}")


def _is_eagle(raw: Mapping[str, Any]) -> bool:
    named = raw.get("architectures")
    return "draft_vocab_size" in raw or (
        isinstance(named, list) and any("eagle3" in str(n).lower() for n in named)
    )
