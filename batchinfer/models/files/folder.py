"""The files of a checkpoint folder, none of which may lie anywhere else."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import CONFIG, HUB_PREFIX
from batchinfer.models.files.config_fields import load_json_object, shown, wrong_checkpoint

SHARED_BLOBS_MARKER = (".huggingface-shared-blobs", "1\n")  # file and content: the layout that we know
FURTHER_TEMPLATES = (
    "additional_chat_templates",
)  # folders that transformers reads where it converts a tokenizer
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


class CheckpointFolder:
    """A folder whose files are regular files inside it.

    A Hugging Face cache keeps a model as `models--org--name/snapshots/<revision>/` full of links into
    `models--org--name/blobs/`, and those may be links into the cache's own `blobs/`, which its models share: links into
    these two folders are allowed, any other link that leaves is not.
    """

    def __init__(self, path: Path) -> None:
        """Raises JobFileError when `path` is no folder, SecurityRefusal when an entry leads outside, or is neither a
        regular file nor a folder."""
        if not path.is_dir():
            what = "a file" if path.is_file() else "missing"
            raise wrong_checkpoint(path, f"{path} is {what}; a checkpoint folder with config.json is needed")
        self.path = path.resolve()
        self._roots = [self.path, *_hub_blobs(self.path)]
        for entry in sorted(self.path.iterdir()):
            self._check_entry(entry)
            if entry.name in FURTHER_TEMPLATES and entry.is_dir():
                for template in sorted(entry.iterdir()):
                    self._check_entry(template)

    def _check_entry(self, entry: Path) -> None:
        target = self._check_inside(entry)
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise _not_regular(entry)

    def _check_inside(self, entry: Path) -> Path:
        try:
            target = entry.resolve()
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            raise SecurityRefusal(f"{entry} is a link that leads nowhere: {error}") from error
        if not any(target == root or root in target.parents for root in self._roots):
            raise SecurityRefusal(
                f"{entry} leads to {target}, outside the checkpoint {self.path}; put a copy of the file there"
            )
        return target

    def file(self, name: str, named_by: str = "") -> Path | None:
        """The regular file of that name, None when there is none.

        `named_by` is the file that the name comes from, where it was not ours. Raises SecurityRefusal when
        the name or a link leads outside, or what is there is no regular file (opening a pipe would hang).
        """
        if not _is_plain(name):
            raise SecurityRefusal(
                f"{self.path / named_by} names the file {shown(name)}; "
                "only files inside the checkpoint folder are read"
            )
        path = self.path / name
        target = self._check_inside(path)
        if not target.exists():
            return None
        if not stat.S_ISREG(target.stat().st_mode):
            raise _not_regular(path)
        return path

    def names(self, *suffixes: str) -> list[str]:
        """Names right in the folder that end so, sorted."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(suffixes))

    def refuse_model_code(self) -> None:
        """Raises SecurityRefusal when config.json names a Python class of the checkpoint's own, for a model that
        nothing here can compute."""
        if self._asks_for_code(CONFIG):
            raise SecurityRefusal(
                f"{self.path / CONFIG} has an auto_map: the checkpoint wants its own Python code run, which batchinfer "
                "never does; use a checkpoint of an architecture that docs/models.md lists"
            )

    def refuse_tokenizer_code(self) -> None:
        """Raises SecurityRefusal when the tokenizer is a Python class of the checkpoint's own, and nothing else."""
        name = self._names_tokenizer_class()
        if name is not None and self.file(TOKENIZER) is None:
            raise SecurityRefusal(
                f"{self.path / name} has an auto_map that names the tokenizer's own Python class, and there is no "
                f"{TOKENIZER}: batchinfer never runs a checkpoint's code; use a copy of the model with a {TOKENIZER}"
            )

    @property
    def unused_code(self) -> tuple[str, ...]:
        """What a user should know of code that the checkpoint asks for and that is not run."""
        name = self._names_tokenizer_class()
        if name is None:
            return ()
        return (f"{name} names the tokenizer's own Python class, which is not run: {TOKENIZER} is used",)

    def _names_tokenizer_class(self) -> str | None:
        """The file that does."""
        named = (name for name in (TOKENIZER_CONFIG, CONFIG) if self._asks_for_code(name, "AutoTokenizer"))
        return next(named, None)

    def _asks_for_code(self, name: str, of: str | None = None) -> bool:
        """Whether the file maps anything, or the class `of`, to Python code of the checkpoint."""
        path = self.file(name)
        stated = load_json_object(path).get("auto_map") if path is not None else None
        return of in stated if of is not None and isinstance(stated, dict) else bool(stated)


def _not_regular(path: Path) -> SecurityRefusal:
    return SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")


def _is_plain(name: str) -> bool:
    """Relative, printable, of bearable length, and without a step upwards."""
    pure = PurePosixPath(name)
    harmless = name.isprintable() and "\\" not in name and not pure.is_absolute()
    return (
        harmless
        and bool(pure.parts)
        and all(part != ".." and len(part.encode()) <= 255 for part in pure.parts)
    )


def _hub_blobs(path: Path) -> list[Path]:
    """Where a hub cache keeps the content of the snapshot `path`, if it is one: its own blobs, and the shared ones."""
    snapshots = path.parent
    entry = snapshots.parent
    if snapshots.name != "snapshots" or not entry.name.startswith(HUB_PREFIX):
        return []
    shared = entry.parent / "blobs"
    return [entry / "blobs", shared] if _is_shared_blobs(shared) else [entry / "blobs"]


def _is_shared_blobs(folder: Path) -> bool:
    """Whether huggingface_hub made the folder: beside a model's entry, another `blobs` could be anybody's."""
    name, content = SHARED_BLOBS_MARKER
    marker = folder / name
    if folder.is_symlink() or marker.is_symlink() or not marker.is_file():
        return False
    with marker.open("rb") as file:
        return file.read(len(content) + 1) == content.encode()
