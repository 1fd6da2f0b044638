"""Finds models by name (`org/name` or `org/name@revision`) in the Hugging Face cache. Uses no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HUB_PREFIX = "models--"  # a model's folder in the cache is models--org--name/snapshots/<commit>
MAIN = "main"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # a LoRA adapter saved by PEFT
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_INDEX_BYTES = 64 * 2**20  # index files of the largest public checkpoints have about 10 MB
_A_NAME = (
    "a model's name is org/name or org/name@revision, of the letters a to z, digits, - _ and ., without -- or .., "
    "with at most 96 characters in each half"
)


class NoModel(LookupError):
    """There is no model at a path, or with a name.

    Attributes:
        hint: Advice for the user.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ModelName:
    """The name of a model on the Hugging Face hub.

    Args:
        repo: The repository, "org/name".
        revision: The branch, tag or commit.
    """

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Parse the name of a model, `org/name` or `org/name@revision`. Raises ValueError for any other text."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

        repo, at, revision = text.partition("@")
        try:
            validate_repo_id(repo)
        except HFValidationError as error:
            raise ValueError(_A_NAME) from error
        if repo.count("/") != 1:
            raise ValueError(_A_NAME)
        if at and not _is_revision(revision):
            raise ValueError("the revision after @ must be a branch, a tag or a commit")
        return cls(repo, revision or MAIN)


def _is_revision(text: str) -> bool:
    parts = text.split("/")
    plain = text.isascii() and text.isprintable() and not set(text) & set(' ~^:?*[\\"')
    return plain and all(part and not part.startswith((".", "-")) and ".." not in part for part in parts)


_WANTED = "it must be the folder of a checkpoint, or a GGUF file"


def locate_model(text: str, path: Path) -> Path:
    """Return the folder or GGUF file of a job's model: `path` if it exists, else its folder in the Hugging Face cache.

    Args:
        text: The value of `model.path` in the job file.
        path: The same value as a path.

    Raises:
        NoModel: There is no such model, or its download is incomplete.
    """
    if path.is_dir() or (path.suffix == GGUF and path.is_file()):
        return path
    if path.is_file():
        raise NoModel(f'"{path}" is a file, not a folder', _WANTED)
    if not _may_be_name(text):
        raise NoModel(f'"{path}" does not exist', _WANTED)
    try:
        name = ModelName.parse(text)
    except ValueError as error:
        raise NoModel(f'there is no folder "{path}", and "{text}" names no model', str(error)) from error
    snapshot = find_snapshot(name)
    if snapshot is None:
        where = f"there is no folder {path}, and no model {name} in the Hugging Face cache {cache_folder()}"
        raise NoModel(where, _pull(name))
    missing = missing_files(snapshot)
    if missing:
        count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NoModel(
            f"the download of {name} is not complete: {missing[0]}{count} missing in {snapshot}", _pull(name)
        )
    return snapshot


def locate_adapter(text: str, path: Path) -> Path:
    """Return the folder of a job's adapter: `path` if it exists, else its folder in the Hugging Face cache.

    If neither exists, return `path`. The folder's content is not checked.

    Args:
        text: The path or name of the adapter in the job file.
        path: The same value as a path.
    """
    if path.exists() or not _may_be_name(text):
        return path
    try:
        return find_snapshot(ModelName.parse(text)) or path
    except ValueError:
        return path


def _pull(name: ModelName) -> str:
    return f"`batchinfer pull {name}` downloads it"


def _may_be_name(text: str) -> bool:
    repo, at, _ = text.partition("@")
    return not repo.startswith((".", "/", "~")) and (repo.count("/") == 1 or bool(at))


def cache_folder() -> Path:
    """Return the folder of the Hugging Face cache: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser()


def find_snapshot(name: ModelName) -> Path | None:
    """Return a model's folder in the Hugging Face cache, or None. The download in it may be incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name.repo, revision=name.revision, local_files_only=True, allow_patterns=[CONFIG]
        )
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path) if error.snapshot_path is not None else None
    except LocalEntryNotFoundError:
        return None
    return Path(found)


def missing_files(snapshot: Path) -> list[str]:
    """Return the names of the files that are missing in a model's folder of the Hugging Face cache.

    A missing file means that the download was interrupted. A GGUF file in the cache is always complete.
    """
    weights = (WEIGHTS, WEIGHT_INDEX)
    others = any((snapshot / name).is_file() for name in weights)
    if not others and any(entry.suffix == GGUF for entry in snapshot.glob("*")):
        return []
    if not (snapshot / CONFIG).exists():
        needed = ADAPTER_WEIGHTS if (snapshot / ADAPTER).exists() else CONFIG
        return [] if (snapshot / needed).exists() else [needed]
    if (snapshot / WEIGHTS).is_file():
        return []
    if not (snapshot / WEIGHT_INDEX).is_file():
        named = any(entry.suffix in (".safetensors", *PICKLE_SUFFIXES) for entry in snapshot.iterdir())
        return [] if named else [WEIGHTS]  # weights in other formats are checked elsewhere
    return [name for name in indexed_names(snapshot / WEIGHT_INDEX) if not (snapshot / name).is_file()]


def indexed_names(index: Path) -> list[str]:
    """Return the names of a checkpoint's weight files, sorted, as its index file lists them.

    The result is [] if the index cannot be read. Names that contain a slash are left out; the code that opens the
    checkpoint refuses them.

    Args:
        index: The file model.safetensors.index.json.
    """
    try:
        with index.open("rb") as file:
            weight_map = json.loads(file.read(MAX_INDEX_BYTES)).get("weight_map")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    names = {name for name in values if isinstance(name, str) and name.endswith(".safetensors")}
    return sorted(name for name in names if "/" not in name and "\0" not in name)


def describe_model(folder: Path) -> str:
    """Return the name of a model for messages.

    It is `org/name@commit` for a folder of the Hugging Face cache, else the path of the folder.
    """
    repo = _repo_of(folder)
    return str(folder) if repo is None else f"{repo}@{folder.name}"


def short_name(folder: Path) -> str:
    """Return the short name of a model.

    It is `org/name` for a folder of the Hugging Face cache, else the last part of the folder's path.
    """
    return _repo_of(folder) or folder.name


def _repo_of(folder: Path) -> str | None:
    entry = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not entry.startswith(HUB_PREFIX):
        return None
    return entry.removeprefix(HUB_PREFIX).replace("--", "/")
