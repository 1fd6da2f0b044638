"""A checkpoint folder, checked before anything of it is loaded. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from batchinfer.errors import SecurityRefusal
from batchinfer.hub import PICKLE_SUFFIXES
from batchinfer.hub import WEIGHT_INDEX as INDEX
from batchinfer.hub import WEIGHTS as SINGLE
from batchinfer.models.config import load_config
from batchinfer.models.config_fields import load_json_object, shown, wrong_checkpoint
from batchinfer.models.fingerprint import Progress, model_fingerprint
from batchinfer.models.folder import CheckpointFolder
from batchinfer.models.parameters import EMBEDDING, HEAD
from batchinfer.models.safetensors_header import TensorInfo, read_header
from batchinfer.models.spec import ModelSpec
from batchinfer.models.tensor_names import expected_shapes, ignores, prefix_of, table_names
from batchinfer_kernels.arithmetic import Dtype

FLOAT_DTYPES: dict[str, Dtype] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float32",
}
NAMED = 5  # tensors that a message lists


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    file: Path
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that passed every check: its weights fit its configuration and nothing in it leads outside."""

    path: Path
    spec: ModelSpec
    files: tuple[Path, ...]  # weight files
    tensors: dict[str, StoredTensor]
    prefix: str  # of the base model's tensors

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @property
    def dtype(self) -> Dtype:
        """As config.json states it; else that of most of the stored bytes."""
        if self.spec.dtype is not None:
            return self.spec.dtype
        sizes: Counter[Dtype] = Counter()
        for tensor in self.tensors.values():
            sizes[FLOAT_DTYPES[tensor.info.dtype]] += tensor.info.nbytes
        return max(sorted(sizes), key=lambda name: sizes[name])

    def fingerprint(self, cache: MutableMapping[str, str], progress: Progress = lambda _: None) -> str:
        """sha256 in hex of what the model computes: the content of its weights and of config.json.

        `cache` maps `fingerprint.file_identity` to the file's sha256 and is filled with what was missing;
        `progress` gets the bytes done since its last call, `sum(f.stat().st_size for f in files)` in all.
        """
        return model_fingerprint(load_json_object(self.path / "config.json"), self.files, cache, progress)


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Check a Hugging Face checkpoint folder without loading it.

    Raises SecurityRefusal (pickle weights, remote code, a path that leaves the folder, a malformed
    safetensors header) or JobFileError (something missing, unsupported, or weights that do not fit).
    """
    folder = CheckpointFolder(path)
    if folder.file("config.json") is None:
        raise wrong_checkpoint(path, f"{path} has no config.json; a Hugging Face checkpoint folder is needed")
    folder.refuse_remote_code()
    files, index = _weight_files(folder)
    spec = load_config(folder.path)
    tensors = _stored_tensors(files)
    prefix = prefix_of(spec.family, tensors)
    _check_index(folder, index, tensors)
    _check_tensors(folder, spec, tensors, prefix)
    return Checkpoint(folder.path, spec, tuple(files), tensors, prefix)


def _weight_files(folder: CheckpointFolder) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the index (tensor → file), empty for a single file, which wins as in transformers."""
    single = folder.file(SINGLE)
    if single is not None:
        return [single], {}
    index = folder.file(INDEX)
    if index is not None:
        return _indexed_files(folder, index)
    raise _no_weights(folder)


def _no_weights(folder: CheckpointFolder) -> Exception:
    pickles = folder.names(*PICKLE_SUFFIXES)
    others = folder.names(".safetensors")
    if pickles and not others:
        return SecurityRefusal(
            f"{folder.path} holds its weights as pickle ({_listed(pickles)}), which can run code when loaded; "
            "convert it to safetensors (transformers: save_pretrained) on a machine that may run such code"
        )
    found = f"; found {_listed(others)}" if others else ""
    return wrong_checkpoint(folder.path, f"no weights: {SINGLE} or {INDEX} is needed in {folder.path}{found}")


def _indexed_files(folder: CheckpointFolder, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = load_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise wrong_checkpoint(
            index, f"{INDEX}: weight_map is {shown(weight_map)}; wanted tensor names → file names"
        )
    files, missing = [], []
    for name in sorted({_shard_name(index, value) for value in weight_map.values()}):
        file = folder.file(name, named_by=INDEX)
        if file is None:
            missing.append(name)
        else:
            files.append(file)
    if missing:
        raise wrong_checkpoint(
            index,
            f"{INDEX} names {_listed(missing)}, missing in {folder.path}",
            hint="the download may be incomplete",
        )
    return files, weight_map


def _shard_name(index: Path, value: object) -> str:
    if not isinstance(value, str) or not value.endswith(".safetensors"):
        raise SecurityRefusal(
            f"{index} names the weight file {shown(value)}; only *.safetensors files are read"
        )
    return value


def _stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise SecurityRefusal(
                    f"tensor {shown(name)} is in {tensors[name].file} and in {file}; it may be in one file only"
                )
            tensors[name] = StoredTensor(file, info)
    return tensors


def _check_index(folder: CheckpointFolder, index: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    """Every tensor must be where the index says."""
    wrong = [
        name
        for name, file in index.items()
        if name not in tensors or tensors[name].file != folder.path / file
    ]
    if wrong:
        raise wrong_checkpoint(folder.path / INDEX, f"{INDEX} names files that do not hold {_listed(wrong)}")


def _check_tensors(
    folder: CheckpointFolder, spec: ModelSpec, tensors: dict[str, StoredTensor], prefix: str
) -> None:
    expected = expected_shapes(spec, prefix)
    found = {name: t.info for name, t in tensors.items() if not ignores(spec.family, name)}
    messages = [
        *_told("missing tensors", _missing(spec, expected, found, prefix)),
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
    spec: ModelSpec, expected: dict[str, tuple[int, ...]], found: dict[str, TensorInfo], prefix: str
) -> list[str]:
    """Tied, the head or the embedding may be absent, not both."""
    missing = [name for name in expected if name not in found]
    names = table_names(spec, prefix)
    tables = {names[HEAD].tensor, names[EMBEDDING].tensor}
    if spec.tied and not tables <= set(missing):
        return [name for name in missing if name not in tables]
    return missing


def _told(what: str, names: list[str]) -> list[str]:
    return [f"{what}: {_listed(names)}"] if names else []


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name)[1:-1][:200] for name in names[:NAMED]) + more
