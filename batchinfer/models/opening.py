"""Opens a checkpoint folder or a GGUF model, of a supported family or for transformers. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from batchinfer.core.gguf.files import GgufModel, read_gguf
from batchinfer.models.checkpoint.checkpoint import (
    Checkpoint,
    check_tensors,
    config_folder,
    dequantisation_notices,
    inspect_checkpoint,
)
from batchinfer.models.checkpoint.config import known_types, parse_config
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import load_json_object
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.foreign.checkpoint import (
    Describe,
    ForeignCheckpoint,
    describe_in_child,
    inspect_foreign,
)
from batchinfer.models.formats.encoded_tensor import EncodedTensors
from batchinfer.models.gguf.config import config_of
from batchinfer.models.gguf.tensors import stored_tensors

# A checkpoint folder that passed every check
StoredModel: TypeAlias = Checkpoint | ForeignCheckpoint


def inspect_gguf(model: GgufModel) -> Checkpoint:
    """Check a GGUF model without loading its weights, and return it as a checkpoint.

    Raises:
        JobFileError: The model is invalid or not supported.
    """
    known, config = config_of(model)
    spec = parse_config(config, {}, model.path)
    tensors, encoded = stored_tensors(model, known, config)
    prefixes = NamePrefixes(FAMILIES[spec.family].names.base)
    hint = (
        f"{model.name} contains another model than it states, or a version of llama.cpp wrote {known.model_type} "
        "differently; the names are from a Hugging Face checkpoint"
    )
    shapes = check_tensors(model.path, spec, tensors, EncodedTensors({**encoded}), prefixes, hint)
    types = sorted({each.type.name for each in model.tensors.values()} - set(FLOAT_DTYPES))
    form = next((each.form for each in encoded.values() if each.form is not None), None)
    notices = dequantisation_notices({" and ".join(types): form} if types else {}, shapes)
    return Checkpoint(model.path, model.files, tensors, spec, prefixes, encoded, shapes, tuple(notices))


def open_checkpoint(path: Path, describe: Describe = describe_in_child) -> StoredModel:
    """Check a checkpoint folder, or a GGUF model in a folder or a file, without loading it.

    Args:
        path: The folder or file.
        describe: Returns the spec of a model that only transformers can run, from the contents of config.json and
            generation_config.json. The default runs transformers in a child process.

    Raises:
        SecurityRefusal: The checkpoint is unsafe to load.
        JobFileError: The checkpoint is invalid or not supported.
    """
    gguf = read_gguf(path)
    if gguf is not None:
        return inspect_gguf(gguf)
    folder = config_folder(path)
    kind = load_json_object(folder.path / "config.json").get("model_type")
    if isinstance(kind, str) and kind not in known_types():
        return inspect_foreign(path, describe)
    return inspect_checkpoint(path)
