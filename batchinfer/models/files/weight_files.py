"""The weight files of a checkpoint folder, checked before anything is loaded. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import GGUF, PICKLE_SUFFIXES
from batchinfer.core.hub import WEIGHT_INDEX as INDEX
from batchinfer.core.hub import WEIGHTS as SINGLE
from batchinfer.models.files.config_fields import checkpoint_error, load_json_object, read_config_json, shown
from batchinfer.models.files.fingerprint import Progress, model_fingerprint
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import DTYPE_BYTES, TensorInfo, data_start, read_header
from batchinfer_kernels.arithmetic import Dtype

FLOAT_DTYPES: dict[str, Dtype] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float32",
}
NAMED = 5  # names that a message lists


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor: a file and a range of bytes in it.

    Args:
        file: The safetensors or GGUF file.
        info: The tensor's dtype, shape and range of bytes.
    """

    file: Path
    info: TensorInfo

    def content(self) -> bytes:
        """Return the bytes of the tensor, read from the file. Use it for small tensors only, such as offsets."""
        with self.file.open("rb") as file:
            file.seek(data_start(self.file) + self.info.start)
            return file.read(self.info.nbytes)

    def integers(self) -> NDArray[np.int64]:
        """Return the values of a tensor with dtype I32 or I64, read from the file and flattened, as int64."""
        return np.frombuffer(self.content(), f"<i{DTYPE_BYTES[self.info.dtype]}").astype(np.int64)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weight files of a checkpoint folder, or a GGUF file.

    Args:
        path: The folder, or the GGUF file.
        files: The weight files.
        tensors: Where each tensor is stored, by name.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @property
    def weight_bytes(self) -> int:
        """Return the number of bytes of all tensors in the files."""
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @property
    def stored_dtype(self) -> Dtype:
        """Return the float dtype that has more bytes in the files than any other; float32 if no tensor is float."""
        sizes: Counter[Dtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.info.dtype in FLOAT_DTYPES:
                sizes[FLOAT_DTYPES[tensor.info.dtype]] += tensor.info.nbytes
        return max(sorted(sizes), key=lambda name: sizes[name], default="float32")

    def fingerprint(self, cache: MutableMapping[str, str], progress: Progress = lambda _: None) -> str:
        """Return a hash (sha256, in hex) of weights and configuration.

        Args:
            cache: Hashes of files by `file_identity`. Missing hashes are added.
            progress: Called with the number of bytes hashed since the last call. They add up to the size of all files.
        """
        whole = self.files[0].suffix == GGUF
        config = {} if whole else read_config_json(self.path)
        return model_fingerprint(config, self.files, cache, progress)

    def check_zero_points(self, cache: MutableMapping[str, str]) -> bool:
        """Return True if earlier versions of batchinfer read wrong zero points from these files, so answers were wrong.

        Args:
            cache: Results of earlier calls. A new result is added.

        Raises:
            JobFileError: Zero points are invalid.
        """
        return False


def read_weight_files(folder: CheckpointFolder) -> WeightFiles:
    """Find the weight files of a checkpoint folder, and read the headers of its safetensors files.

    Raises:
        SecurityRefusal: Weights are pickled, a path leaves the folder, or a header is malformed.
        JobFileError: Files are missing, or model.safetensors.index.json does not match them.
    """
    files, index = _weight_files(folder)
    tensors = _stored_tensors(files)
    _check_index(folder, index, tensors)
    return WeightFiles(folder.path, tuple(files), tensors)


def _weight_files(folder: CheckpointFolder) -> tuple[list[Path], dict[str, str]]:
    # As in transformers, model.safetensors takes precedence over an index
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
            f"{folder.path} holds its weights as pickle ({listed(pickles)}), which can run code when loaded; "
            "convert it to safetensors (transformers: save_pretrained) on a machine that may run such code"
        )
    found = f"; found {listed(others)}" if others else ""
    return checkpoint_error(folder.path, f"no weights: {SINGLE} or {INDEX} is needed in {folder.path}{found}")


def _indexed_files(folder: CheckpointFolder, index: Path) -> tuple[list[Path], dict[str, str]]:
    weight_map = load_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise checkpoint_error(
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
        raise checkpoint_error(
            index,
            f"{INDEX} names {listed(missing)}, missing in {folder.path}",
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
    wrong = [
        name
        for name, file in index.items()
        if name not in tensors or tensors[name].file != folder.path / file
    ]
    if wrong:
        raise checkpoint_error(folder.path / INDEX, f"{INDEX} names files that do not hold {listed(wrong)}")


def listed(names: list[str]) -> str:
    """Join names for an error message. After NAMED names, only the number of further ones is stated."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name)[1:-1][:200] for name in names[:NAMED]) + more
