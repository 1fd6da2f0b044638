"""Implements `batchinfer init`: writes a job that runs, example rows, and a small model unless one is named."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from batchinfer.core.errors import BatchInferError, UsageError
from batchinfer.core.gguf.files import gguf_files
from batchinfer.core.hub import CONFIG, GGUF, ModelName, find_snapshot, missing_files
from batchinfer.filesystem.durable import FileOps, storage, write_new
from batchinfer.job.template import ORDERS, QUESTIONS, ModelKind, init_files
from batchinfer.models.files.config_fields import QUANTIZATION, read_config_json
from batchinfer.verbs.schema_starter import SchemaFile

_MOST_OF_NAME = 200  # characters of a job's name
_PACKAGE = Path(str(files("batchinfer"))).resolve()  # an editable installation uses a link
# Folders of the quickstart's model: in an installed package, and in a clone
_SHIPPED = (_PACKAGE / "quickstart_model", _PACKAGE.parent / "jobs" / "quickstart" / "model")


@dataclass(frozen=True, slots=True)
class Starter:
    """The files that `batchinfer init` wrote, and the model that the new job names.

    Attributes:
        wrote: The written files.
        model: The folder of the model, or its name in the Hugging Face cache.
        ready: True if the model exists on this machine.
        stand_in: True if the quickstart's small model was copied although a schema is given. Its answers follow the
            schema but are meaningless.
    """

    wrote: tuple[Path, ...]
    model: Path | ModelName
    ready: bool
    stand_in: bool = False


def write_starter(folder: Path, model: str | None, schema: Path | None = None) -> Starter:
    """Write a new job into a folder.

    Args:
        folder: The folder.
        model: A folder, or a name in the Hugging Face cache. None for the model in `folder`, or else a copy of the
            quickstart's model.
        schema: The file of a JSON Schema that answers follow, or None.

    Raises:
        UsageError: The folder has a job.
        InputMissing or InputCorrupt: The schema is missing or invalid.
        StorageError: A file cannot be written.
    """
    answer = None if schema is None else SchemaFile.read(schema)
    name = None if model is None else _name(model)
    here = folder / "model"
    shipped = None if model is not None or os.path.lexists(here) else _shipped_model()
    sample = QUESTIONS if shipped is None else ORDERS  # the only task of the quickstart's model
    if answer is not None:
        sample = answer.sample(answer.path.name)
    # Paths of a job file start from its folder
    named = "model" if model is None else model if name else os.path.relpath(model, folder)
    snapshot = None if name is None else find_snapshot(name)
    place = snapshot or shipped or (here if model is None else Path(model))
    texts = init_files(named, sample, _job_name(folder), _kind(place), name is not None)
    files = {name: text.encode() for name, text in texts.items()}
    if shipped is not None:
        files |= {
            f"model/{path.name}": path.read_bytes() for path in sorted(shipped.iterdir()) if path.is_file()
        }
    if answer is not None:
        files |= _beside(answer, folder, files)
    wrote = _write(folder, files)
    if name is not None:
        return Starter(wrote, name, _is_cached(name))
    used = here if model is None else Path(model)
    return Starter(wrote, used, _is_model(used), shipped is not None and answer is not None)


def _name(model: str) -> ModelName | None:
    # None for a folder, including a new one in an existing folder
    if Path(model).exists() or Path(model).parent.exists():
        return None
    try:
        return ModelName.parse(model)
    except ValueError:
        return None


def _job_name(folder: Path) -> str:
    name = folder.resolve().name.encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x1f\x7f]", "-", name)[:_MOST_OF_NAME] or "my-job"


def _kind(path: Path) -> ModelKind:
    # An unreadable checkpoint counts as floats: the next command checks the job
    try:
        if path.suffix == GGUF or gguf_files(path):
            return "gguf"
        quantised = (path / CONFIG).is_file() and QUANTIZATION in read_config_json(path)
    except BatchInferError:
        return "floats"
    return "quantised" if quantised else "floats"


def _is_model(path: Path) -> bool:
    """Return True for a checkpoint: a folder with a config.json or a GGUF file, or a GGUF file itself."""
    there = [path] if path.is_file() else path.glob("*")
    return any(each.name == CONFIG or each.suffix == GGUF for each in there)


def _beside(answer: SchemaFile, folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    name = answer.path.name
    if name in files:
        raise UsageError(f"{answer.path}: has the name of a file that init writes; rename it")
    if os.path.realpath(answer.path) == os.path.realpath(folder / name):
        return {}
    return {name: answer.data}


def _is_cached(name: ModelName) -> bool:
    snapshot = find_snapshot(name)
    return snapshot is not None and not missing_files(snapshot)


def _shipped_model() -> Path | None:
    return next((folder for folder in _SHIPPED if (folder / CONFIG).is_file()), None)


def _write(folder: Path, files: dict[str, bytes]) -> tuple[Path, ...]:
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise UsageError(f"{folder / there[0]}: exists already; choose another folder")
    for name, data in files.items():
        path = folder / name
        with storage(path.parent, "create"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, [data], FileOps())
    return tuple(folder / name for name in files)
