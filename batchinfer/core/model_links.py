"""Links in a model's folder: where they may lead. A Hugging Face cache is made of links, other links may be a trap."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import HUB_PREFIX

SHARED_BLOBS_MARKER = (".huggingface-shared-blobs", "1\n")  # file and content: the layout that we know


def model_roots(folder: Path) -> list[Path]:
    """The folders in which the files of the model in `folder`, a resolved path, may lie.

    A Hugging Face cache keeps a model as `models--org--name/snapshots/<revision>/` full of links into
    `models--org--name/blobs/`, and those may be links into the cache's own `blobs/`, which its models share.
    """
    return [folder, *_hub_blobs(folder)]


def inside(entry: Path, roots: list[Path]) -> Path:
    """Follow `entry` to the file it leads to. Raises SecurityRefusal when that lies in none of `roots`.

    The first of these is the model's folder.
    """
    try:
        target = entry.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise SecurityRefusal(f"{entry} is a link that leads nowhere: {error}") from error
    if not any(target == root or root in target.parents for root in roots):
        raise SecurityRefusal(
            f"{entry} leads to {target}, outside the checkpoint {roots[0]}; put a copy of the file there"
        )
    return target


def _hub_blobs(path: Path) -> list[Path]:
    """Where a hub cache keeps the content of the snapshot `path`, if it is one: its own blobs, and the shared ones."""
    snapshots = path.parent
    entry = snapshots.parent
    if snapshots.name != "snapshots" or not entry.name.startswith(HUB_PREFIX):
        return []
    shared = entry.parent / "blobs"
    return [entry / "blobs", shared] if _is_shared_blobs(shared) else [entry / "blobs"]


def _is_shared_blobs(folder: Path) -> bool:
    """Whether huggingface_hub made the folder: elsewhere, a folder `blobs` next to a model's entry could be
    anybody's."""
    name, content = SHARED_BLOBS_MARKER
    marker = folder / name
    if folder.is_symlink() or marker.is_symlink() or not marker.is_file():
        return False
    with marker.open("rb") as file:
        return file.read(len(content) + 1) == content.encode()
