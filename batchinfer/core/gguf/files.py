"""Finds the GGUF files of a model (one file or several parts) and reads their headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.gguf.header import AGAIN, GgufTensor, read_header, wrong_gguf
from batchinfer.core.hub import GGUF, WEIGHT_INDEX, WEIGHTS
from batchinfer.core.model_links import model_roots, resolve_inside

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PROJECTOR = "mmproj"  # prefix of image projectors, which are not supported
_NAMED = 5  # maximum number of files in a message


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The headers of a model in GGUF.

    Args:
        path: The value of model.path: a file or a folder.
        files: The files of the model; large models are split into several, in this order.
        metadata: The metadata of the first file by key.
        tensors: The tensors of all files by name.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def name(self) -> str:
        """Return the name of the model's first file, for messages."""
        return self.files[0].name


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the GGUF model at a path, in order; () if there is no model.

    Args:
        path: A file or a folder. A folder with safetensors is not a GGUF model.

    Raises:
        JobFileError: The folder contains several models, or files of a split model are missing.
        SecurityRefusal: A link leads out of the folder.
    """
    if path.suffix == GGUF and path.is_file():
        return _parts(path)
    if not path.is_dir() or any((path / name).is_file() for name in (WEIGHTS, WEIGHT_INDEX)):
        return ()
    roots = model_roots(path.resolve())
    files = sorted(each for each in path.iterdir() if each.suffix == GGUF and is_model(each.name))
    models = sorted({_parts(each) for each in files if resolve_inside(each, roots).is_file()})
    if len(models) > 1:
        names = [files[0].name for files in models]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = f"{', '.join(names[:_NAMED])}{more}"
        hint = f"name the file, such as {models[0][0]}"
        raise wrong_gguf(path, f"{path} contains {len(models)} models in GGUF: {listed}", hint=hint)
    return models[0] if models else ()


def is_model(name: str) -> bool:
    """Return True if a GGUF file with this name may belong to a language model, rather than be an image projector."""
    return not name.startswith(_PROJECTOR)


def parts_of(name: str) -> list[str]:
    """Return the names of all files of a split GGUF model in order, given the name of any of them."""
    named = _PART.fullmatch(name)
    if named is None:
        return [name]
    stem, count = named["stem"], named["count"]
    return [f"{stem}-{number:05}-of-{count}{GGUF}" for number in range(1, int(count) + 1)]


def _parts(file: Path) -> tuple[Path, ...]:
    parts = [file.with_name(name) for name in parts_of(file.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = f"{file.name} is one of {len(parts)} files of a model, and {missing[0]}{more} missing in its folder"
        raise wrong_gguf(file, text, hint="the download may be incomplete")
    roots = model_roots(file.parent.resolve())
    for part in parts:
        if part != file:
            resolve_inside(part, roots)
    return tuple(parts)


def read_gguf(path: Path) -> GgufModel | None:
    """Read the headers of the GGUF model at a path. Return None if there is no GGUF model.

    Args:
        path: A file or a folder. A folder with safetensors is not a GGUF model.

    Raises:
        JobFileError: A file is damaged, or the files do not form a model.
        SecurityRefusal: A link leads out of the folder.
    """
    files = gguf_files(path)
    if not files:
        return None
    first, *others = (read_header(file) for file in files)
    tensors = dict(first.tensors)
    for file, header in zip(files[1:], others, strict=True):
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise wrong_gguf(
                file, f"{file.name} contains the tensor {twice}, which another part also contains"
            )
        tensors |= header.tensors
    _check_parts(path, files, first.metadata)
    return GgufModel(path, files, first.metadata, tensors)


def _check_parts(path: Path, files: tuple[Path, ...], metadata: Mapping[str, Any]) -> None:
    kind, count = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if kind != "model":
        text = f"{files[0].name} is not a model: its general.type is {kind!r}"
        raise wrong_gguf(path, text, hint="use the file of the model that it was made for")
    if count not in (0, len(files)):
        text = f"{files[0].name} is one of {count} files of a model, and there are {len(files)}"
        raise wrong_gguf(path, text, hint=f"keep the names that end with -00001-of-{count:05}{GGUF}; {AGAIN}")
