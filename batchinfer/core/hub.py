"""Models by name: `org/name` or `org/name@revision` in the Hugging Face cache on this machine. Uses no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

HUB_PREFIX = "models--"  # of a model's folder in the cache: models--org--name/snapshots/<commit>
MAIN = "main"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
GGUF = ".gguf"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of a LoRA, as PEFT saves it
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_INDEX_BYTES = 64 * 2**20  # index files of the largest public checkpoints have some 10 MB
_A_NAME = (
    "a model's name is org/name or org/name@revision, of the letters a to z, digits, - _ and ., without -- or .., "
    "with at most 96 characters in each half"
)


class NoModel(LookupError):
    """There is no model at a path or under a name; `hint` is the next step."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model on a Hugging Face hub: `revision` is a branch, a tag or a commit."""

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises ValueError when `text` is no name."""
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
    """Whether git allows this revision; it must not lead out of the cache either, where it is part of a path."""
    parts = text.split("/")
    plain = text.isascii() and text.isprintable() and not set(text) & set(' ~^:?*[\\"')
    return plain and all(part and not part.startswith((".", "-")) and ".." not in part for part in parts)


_WANTED = "it must be the folder of a checkpoint, or a GGUF file"


def locate_model(text: str, path: Path) -> Path:
    """The folder of the model that a job names by `text`, or its GGUF file: `path` if that is one, else the cache's
    folder.

    Raises NoModel.
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
    """Return the folder of the adapter that a job names by `text`: `path`, or else the cache's of that name, if there
    is one. Who checks the adapter says what is wrong with the folder."""
    if path.exists() or not _may_be_name(text):
        return path
    try:
        return find_snapshot(ModelName.parse(text)) or path
    except ValueError:
        return path


def _pull(name: ModelName) -> str:
    return f"`batchinfer pull {name}` downloads it"


def _may_be_name(text: str) -> bool:
    """One step below a relative folder, or with a revision: what else is no folder is only a wrong path."""
    repo, at, _ = text.partition("@")
    return not repo.startswith((".", "/", "~")) and (repo.count("/") == 1 or bool(at))


def cache_folder() -> Path:
    """The Hugging Face cache: HF_HUB_CACHE, or hub in HF_HOME, or in ~/.cache/huggingface."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).expanduser()


def find_snapshot(name: ModelName) -> Path | None:
    """The model's folder in the cache, whether its download is complete or not; None when there is none."""
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
    """List the files that an interrupted download lacks, as far as the files that are there tell. A GGUF file is whole
    where it is linked."""
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
        return [] if named else [WEIGHTS]  # what is wrong with other weights is told where they are checked
    return [name for name in indexed_names(snapshot / WEIGHT_INDEX) if not (snapshot / name).is_file()]


def indexed_names(index: Path) -> list[str]:
    """The weight files that an index names, sorted; none where it cannot be read as an index.

    Names that lead elsewhere are left out: whoever checks the checkpoint refuses them.
    """
    try:
        with index.open("rb") as file:
            weight_map = json.loads(file.read(MAX_INDEX_BYTES)).get("weight_map")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    values = weight_map.values() if isinstance(weight_map, dict) else ()
    names = {name for name in values if isinstance(name, str) and name.endswith(".safetensors")}
    return sorted(name for name in names if "/" not in name and "\0" not in name)


def described(folder: Path) -> str:
    """A model for people: `org/name@commit` for a folder of the cache, else the folder."""
    repo = _repo_of(folder)
    return str(folder) if repo is None else f"{repo}@{folder.name}"


def short_name(folder: Path) -> str:
    """A model's name without where it lies: `org/name` for a folder of the cache, else the folder's own name."""
    return _repo_of(folder) or folder.name


def _repo_of(folder: Path) -> str | None:
    entry = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not entry.startswith(HUB_PREFIX):
        return None
    return entry.removeprefix(HUB_PREFIX).replace("--", "/")
