"""The linear layers that sentence-transformers applies after pooling, each stored in its own folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from batchinfer.core.embedding import Dense, DenseActivation, DenseDtype
from batchinfer.core.errors import JobFileError
from batchinfer.models.files.config_fields import checkpoint_error, load_json_object, shown
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import PREFIX_BYTES, TensorInfo, read_header

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_WEIGHT, _BIAS = "linear.weight", "linear.bias"
# The only supported value of module_input_name and module_output_name, which newer versions write
_VECTOR = "sentence_embedding"
_MOST_OUTPUTS = 1 << 16


def dense_module(folder: CheckpointFolder, name: str, named_by: str) -> Dense:
    """Check a linear layer that sentence-transformers applies after pooling, and return its file, sizes and activation.

    Args:
        folder: The checkpoint.
        name: The subfolder of the checkpoint that contains the layer.
        named_by: The file that contains this name, for messages.

    Raises:
        JobFileError: The layer is not supported.
        SecurityRefusal: A file is outside of the folder or malformed.
    """
    config, weights = (folder.file(f"{name}/{file}", named_by) for file in (CONFIG, WEIGHTS))
    if config is None or weights is None:
        missing = CONFIG if config is None else WEIGHTS
        text = f"{named_by} has the module Dense in the folder {shown(name)}, which has no {missing}"
        raise checkpoint_error(folder.path, text, hint="pickled weights (pytorch_model.bin) are not read")
    stated = load_json_object(config)
    tensors = read_header(weights)
    wrong = _problem(stated, tensors)
    if wrong is not None:
        raise _refusal(folder, name, wrong)
    weight, bias = tensors[_WEIGHT], tensors.get(_BIAS)
    outputs, inputs = weight.shape
    content = weights.read_bytes()
    begin = PREFIX_BYTES + int.from_bytes(content[:PREFIX_BYTES], "little")
    return Dense(
        file=str(weights),
        digest=hashlib.sha256(content).hexdigest(),
        inputs=inputs,
        outputs=outputs,
        dtype=cast(DenseDtype, weight.dtype),
        weight=begin + weight.start,
        bias=None if bias is None else begin + bias.start,
        activation=cast(DenseActivation, _activation(stated)),
    )


def _refusal(folder: CheckpointFolder, name: str, wrong: str) -> JobFileError:
    return checkpoint_error(Path(folder.path), f"the module Dense in {shown(name)}: {wrong}")


def _activation(stated: Mapping[str, Any]) -> str:
    return str(stated.get("activation_function", "Tanh")).rpartition(".")[2]


def _problem(stated: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str | None:
    if (activation := _activation(stated)) not in get_args(DenseActivation):
        return f"its activation {activation} is not computed; {', '.join(get_args(DenseActivation))} are"
    for key in ("module_input_name", "module_output_name"):
        if stated.get(key, _VECTOR) not in (None, _VECTOR):
            return f"its {key} is {shown(stated[key])}; only {_VECTOR} is computed"
    biased = stated.get("bias", True)
    wanted = {_WEIGHT: (stated.get("out_features"), stated.get("in_features"))}
    shapes = {**wanted, _BIAS: wanted[_WEIGHT][:1]} if biased else wanted
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != shapes or max(found[_WEIGHT]) > _MOST_OUTPUTS:
        return f"its weights are {shown(found)}, and {CONFIG} says {shown(shapes)}"
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(get_args(DenseDtype)):
        return f"its weights are {', '.join(sorted(dtypes))}; wanted one of {', '.join(get_args(DenseDtype))}"
    return None
