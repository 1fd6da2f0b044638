"""A model in GGUF, checked before anything of it is loaded. No torch."""

from __future__ import annotations

from batchinfer.core.gguf.files import GgufModel
from batchinfer.models.checkpoint.checkpoint import Checkpoint, check_tensors, dequantised
from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.formats.packed_tensor import PackedTensors
from batchinfer.models.gguf.config import config_of
from batchinfer.models.gguf.tensors import stored_tensors


def inspect_gguf(model: GgufModel) -> Checkpoint:
    """Check a model in GGUF without loading it. Raises JobFileError for what cannot be run."""
    known, config = config_of(model)
    spec = parse_config(config, {}, model.path)
    tensors, packed = stored_tensors(model, known, config)
    prefixes = NamePrefixes(FAMILIES[spec.family].names.base)
    hint = (
        f"{model.name} holds another model than it states, or one of a llama.cpp that stored {known.model_type} in "
        "another way; the names are those of a Hugging Face checkpoint"
    )
    shapes = check_tensors(model.path, spec, tensors, PackedTensors({**packed}), prefixes, hint)
    types = sorted({each.type.name for each in model.tensors.values()} - set(FLOAT_DTYPES))
    form = next((each.form for each in packed.values() if each.form is not None), None)
    notices = dequantised({" and ".join(types): form} if types else {}, shapes)
    return Checkpoint(model.path, model.files, tensors, spec, prefixes, packed, shapes, tuple(notices))
