"""A checkpoint folder, checked before anything of it is loaded. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.models.config import decoder_config, is_supported, load_config, multimodal_of
from batchinfer.models.config_fields import load_json_object, wrong_checkpoint
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.multimodal import Multimodal
from batchinfer.models.folder import CheckpointFolder
from batchinfer.models.model_cost import model_cost
from batchinfer.models.parameters import EMBEDDING, HEAD
from batchinfer.models.safetensors_header import TensorInfo
from batchinfer.models.spec import ModelSpec
from batchinfer.models.tensor_names import (
    expected_shapes,
    further_layers,
    ignores,
    prefixes_of,
    table_names,
)
from batchinfer.models.weight_files import (
    FLOAT_DTYPES,
    StoredTensor,
    WeightFiles,
    listed,
    read_weight_files,
)
from batchinfer_kernels.arithmetic import Dtype
from batchinfer_kernels.cost import ModelCost

OWN = "batchinfer"  # whose code computes a model of a family of ours


@dataclass(frozen=True, slots=True)
class Checkpoint(WeightFiles):
    """A folder of one of our families that passed every check: its weights fit its configuration. `tensors` are those
    that are read."""

    spec: ModelSpec
    prefixes: NamePrefixes
    notices: tuple[str, ...] = ()  # what a user should know before it runs

    @property
    def dtype(self) -> Dtype:
        """As config.json states it; else that of most of the stored bytes."""
        return self.spec.dtype or self.stored_dtype

    @property
    def modelling(self) -> str:
        """Whose code computes the model."""
        return OWN

    def refusals(self, quantized: bool, deterministic: bool) -> list[tuple[str, str]]:
        """What is asked for and cannot be had of this model, whatever the device: key of the job file, and why."""
        return []

    def cost(self, itemsize: int, weight_itemsize: int) -> ModelCost:
        """What its steps cost; see model_cost."""
        return model_cost(self.spec, itemsize, weight_itemsize)


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Check a Hugging Face checkpoint folder of one of our families without loading it.

    An auto_map of config.json is ignored: the family's code here computes the model, and none of the checkpoint's is
    run. Raises SecurityRefusal (pickle weights, another class with an auto_map, a tokenizer that is nothing but Python
    code, a path that leaves the folder, a malformed safetensors header) or JobFileError (something is missing or not
    supported, or weights do not fit).
    """
    folder = config_folder(path)
    raw = load_json_object(folder.path / "config.json")
    if not is_supported(raw):
        folder.refuse_model_code()
    folder.refuse_tokenizer_code()
    files = read_weight_files(folder)
    spec = load_config(folder.path)
    whole = multimodal_of(raw)
    prefixes = prefixes_of(spec.family, files.tensors, whole.prefixes if whole else ())
    unused = (*further_layers(spec, decoder_config(raw), prefixes),)
    tensors = {
        name: tensor
        for name, tensor in files.tensors.items()
        if not (ignores(spec.family, name) or name.startswith(unused) or (whole and whole.part_of(name)))
    }
    _check_tensors(folder, spec, tensors, prefixes)
    notices = (*([_text_alone(whole, files.tensors)] if whole else ()), *folder.unused_code)
    return Checkpoint(folder.path, files.files, tensors, spec, prefixes, notices)


def _text_alone(whole: Multimodal, tensors: Iterable[str]) -> str:
    """What a user should know of a model of several parts."""
    parts = Counter(part for name in tensors if (part := whole.part_of(name)))
    left_out = ", ".join(f"{count} of {part}" for part, count in parts.items())
    return f"{whole.architecture}: text only; tensors that are not loaded: {left_out or 'none'}"


def config_folder(path: Path) -> CheckpointFolder:
    """The folder, once it is sure that it has a config.json. Raises JobFileError, SecurityRefusal."""
    folder = CheckpointFolder(path)
    if folder.file("config.json") is None:
        raise wrong_checkpoint(path, f"{path} has no config.json; a Hugging Face checkpoint folder is needed")
    return folder


def _check_tensors(
    folder: CheckpointFolder, spec: ModelSpec, tensors: dict[str, StoredTensor], prefixes: NamePrefixes
) -> None:
    expected = expected_shapes(spec, prefixes)
    found = {name: tensor.info for name, tensor in tensors.items()}
    messages = [
        *_told("missing tensors", _missing(spec, expected, found, prefixes)),
        *_told("unexpected tensors", [name for name in found if name not in expected]),
        *_told("tensors of a wrong shape", [
            f"{name} {list(info.shape)} instead of {list(expected[name])}"
            for name, info in found.items()
            if name in expected and info.shape != expected[name]
        ]),
        *_told("tensors that are not float", [
            f"{name} ({info.dtype})" for name, info in found.items() if info.dtype not in FLOAT_DTYPES
        ]),
    ]  # fmt: skip
    if messages:
        hint = f"config.json describes another model than the weights, or another family than {spec.family}"
        raise wrong_checkpoint(folder.path, *messages, hint=hint)


def _missing(
    spec: ModelSpec,
    expected: dict[str, tuple[int, ...]],
    found: dict[str, TensorInfo],
    prefixes: NamePrefixes,
) -> list[str]:
    """Tied, the head or the embedding may be absent, not both."""
    missing = [name for name in expected if name not in found]
    names = table_names(spec, prefixes)
    tables = {names[HEAD].tensor, names[EMBEDDING].tensor}
    if spec.tied and not tables <= set(missing):
        return [name for name in missing if name not in tables]
    return missing


def _told(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {listed(names)}"] if names else []
