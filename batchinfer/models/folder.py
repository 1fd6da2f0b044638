"""The files of a checkpoint folder, none of which may lie anywhere else."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from batchinfer.errors import SecurityRefusal
from batchinfer.hub import HUB_PREFIX
from batchinfer.models.config_fields import load_json_object, shown, wrong_checkpoint

SHARED_BLOBS_MARKER = (".huggingface-shared-blobs", "1\n")  # file and content: the layout that we know
REMOTE_CODE_FILES = ("config.json", "tokenizer_config.json", "generation_config.json")


class CheckpointFolder:
    """A folder whose files are regular files inside it.

    A Hugging Face cache keeps a model as `models--org--name/snapshots/<revision>/` full of links into
    `models--org--name/blobs/`, and those may be links into the cache's own `blobs/`, which its models share: links into
    these two folders are allowed, any other link that leaves is not.
    """

    def __init__(self, path: Path) -> None:
        """Raises JobFileError when `path` is no folder, SecurityRefusal when an entry leads outside."""
        if not path.is_dir():
            what = "a file" if path.is_file() else "missing"
            raise wrong_checkpoint(path, f"{path} is {what}; a checkpoint folder with config.json is needed")
        self.path = path.resolve()
        self._roots = [self.path, *_hub_blobs(self.path)]
        for entry in sorted(self.path.iterdir()):
            self._check_inside(entry)

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
            raise SecurityRefusal(f"{path} is not a regular file; put a copy of the file there")
        return path

    def names(self, *suffixes: str) -> list[str]:
        """Names right in the folder that end so, sorted."""
        return sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(suffixes))

    def refuse_remote_code(self, besides: str = "") -> None:
        """Raises SecurityRefusal when a configuration file, `besides` excepted, asks for the checkpoint's own Python
        code."""
        for name in REMOTE_CODE_FILES:
            path = self.file(name)
            if name != besides and path is not None and load_json_object(path).get("auto_map"):
                raise SecurityRefusal(
                    f"{path} has an auto_map: the checkpoint wants its own Python code run, which batchinfer "
                    "never does; use a checkpoint of a supported architecture without it"
                )


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
