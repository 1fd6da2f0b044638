"""Finds the GGUF files of a model, one or several parts, and reads what they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.gguf.header import AGAIN, GgufTensor, read_header, wrong_gguf
from batchinfer.core.hub import GGUF, WEIGHT_INDEX, WEIGHTS
from batchinfer.core.model_links import inside, model_roots

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PROJECTOR = "mmproj"  # begins the name of what makes images of use to a model: it is not read
_NAMED = 5  # files that a message lists


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in GGUF: its files, what they state, and its tensors by the names that they have there."""

    path: Path  # what a job names
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def name(self) -> str:
        """The name of its first file, for messages."""
        return self.files[0].name


def gguf_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the model at `path`, a file or a folder, in their order; none where it is no GGUF model: a
    folder with safetensors is not. Raises JobFileError for several models in a folder, and for parts that are missing,
    SecurityRefusal for a link out of the folder."""
    if path.suffix == GGUF and path.is_file():
        return _parts(path)
    if not path.is_dir() or any((path / name).is_file() for name in (WEIGHTS, WEIGHT_INDEX)):
        return ()
    roots = model_roots(path.resolve())
    files = sorted(each for each in path.iterdir() if each.suffix == GGUF and is_model(each.name))
    models = sorted({_parts(each) for each in files if inside(each, roots).is_file()})
    if len(models) > 1:
        names = [files[0].name for files in models]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = f"{', '.join(names[:_NAMED])}{more}"
        hint = f"name the file, such as {models[0][0]}"
        raise wrong_gguf(path, f"{path} holds {len(models)} models in GGUF: {listed}", hint=hint)
    return models[0] if models else ()


def is_model(name: str) -> bool:
    """Whether a file of this name may be a model, or a part of one."""
    return not name.startswith(_PROJECTOR)


def parts_of(name: str) -> list[str]:
    """Return the names of all parts of the model that a file of this name is a part of, in their order."""
    named = _PART.fullmatch(name)
    if named is None:
        return [name]
    stem, count = named["stem"], named["count"]
    return [f"{stem}-{number:05}-of-{count}{GGUF}" for number in range(1, int(count) + 1)]


def _parts(file: Path) -> tuple[Path, ...]:
    """Return all parts of the model that a file is a part of. Raises JobFileError where some are missing."""
    parts = [file.with_name(name) for name in parts_of(file.name)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        text = (
            f"{file.name} is one of {len(parts)} files of a model, and {missing[0]}{more} missing beside it"
        )
        raise wrong_gguf(file, text, hint="the download may be incomplete")
    roots = model_roots(file.parent.resolve())
    for part in parts:
        if part != file:
            inside(part, roots)
    return tuple(parts)


def read_gguf(path: Path) -> GgufModel | None:
    """Read the headers of the GGUF model at `path`; None where it is none. Raises JobFileError, SecurityRefusal."""
    files = gguf_files(path)
    if not files:
        return None
    first, *others = (read_header(file) for file in files)
    tensors = dict(first.tensors)
    for file, header in zip(files[1:], others, strict=True):
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise wrong_gguf(file, f"{file.name} holds the tensor {twice}, which another part holds, too")
        tensors |= header.tensors
    _check_parts(path, files, first.metadata)
    return GgufModel(path, files, first.metadata, tensors)


def _check_parts(path: Path, files: tuple[Path, ...], metadata: Mapping[str, Any]) -> None:
    """Raises JobFileError for something else than a model, and for a part under the name of a whole."""
    kind, count = metadata.get("general.type", "model"), metadata.get("split.count", 0)
    if kind != "model":
        text = f"{files[0].name} holds no model, but what general.type calls {kind!r}"
        raise wrong_gguf(path, text, hint="name the file of the model that it was made for")
    if count not in (0, len(files)):
        text = f"{files[0].name} is one of {count} files of a model, and there are {len(files)}"
        raise wrong_gguf(path, text, hint=f"keep the names that end with -00001-of-{count:05}{GGUF}; {AGAIN}")
