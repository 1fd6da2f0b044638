"""Checks links in a model's folder: links inside of a Hugging Face cache are allowed, others are refused."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import SecurityRefusal
from batchinfer.core.hub import HUB_PREFIX

SHARED_BLOBS_MARKER = (
    ".huggingface-shared-blobs",
    "1\n",
)  # file and content; the version of the supported layout


def model_roots(folder: Path) -> list[Path]:
    """Return the folders in which the files of a model may be, the model's own folder first.

    In a Hugging Face cache, `models--org--name/snapshots/<revision>/` contains links into `models--org--name/blobs/`,
    and these may be links into a `blobs/` folder that all models of the cache share.

    Args:
        folder: The model's folder, a resolved path.
    """
    return [folder, *_hub_blobs(folder)]


def resolve_inside(entry: Path, roots: list[Path]) -> Path:
    """Resolve all links in a path, and check that the result is inside of one of the allowed folders.

    Args:
        entry: A file of the model, possibly a link.
        roots: The allowed folders, from `model_roots`.

    Raises:
        SecurityRefusal: The path leads elsewhere, or nowhere.
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
    snapshots = path.parent
    entry = snapshots.parent
    if snapshots.name != "snapshots" or not entry.name.startswith(HUB_PREFIX):
        return []
    shared = entry.parent / "blobs"
    return [entry / "blobs", shared] if _is_shared_blobs(shared) else [entry / "blobs"]


def _is_shared_blobs(folder: Path) -> bool:
    # Without huggingface_hub's marker, any user could have created the folder
    name, content = SHARED_BLOBS_MARKER
    marker = folder / name
    if folder.is_symlink() or marker.is_symlink() or not marker.is_file():
        return False
    with marker.open("rb") as file:
        return file.read(len(content) + 1) == content.encode()
