"""The conventions of sentence-transformers for cross-encoders."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.hub import CONFIG
from batchinfer.models.files.config_fields import load_json_object
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.sentence_modules import PROMPTS

_KEY = "activation_fn"
_OLD_KEY = "sbert_ce_default_activation_function"  # of versions before 4


def stated_activation(path: Path) -> str | None:
    """Return the class that a checkpoint's scores pass, as its files name it: that of the newest version that wrote
    one. None: they name none. Raises JobFileError, SecurityRefusal."""
    if path.is_file():  # in GGUF
        return None
    folder = CheckpointFolder(path)
    own, config = (_stored(folder, name) for name in (PROMPTS, CONFIG))
    newer = config.get("sentence_transformers")
    each = (own.get(_KEY), newer.get(_KEY) if isinstance(newer, dict) else None, config.get(_OLD_KEY))
    return next((str(one) for one in each if one is not None), None)


def _stored(folder: CheckpointFolder, name: str) -> dict[str, object]:
    file = folder.file(name)
    return {} if file is None else load_json_object(file)
