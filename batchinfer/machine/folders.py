"""Folders that only their owner can write into, whatever the umask."""

from __future__ import annotations

from pathlib import Path

SHARED_READ = 0o755


def make_folder(path: Path, mode: int = SHARED_READ) -> None:
    """Create a folder, and those above it that are missing.

    `Path.mkdir(parents=True)` would give the folders above 0777 under an umask of 0.

    Args:
        path: The folder. It may be there already.
        mode: Its permissions, from which the umask is taken.

    Raises:
        OSError: A folder cannot be created, or there is a file in its place.
    """
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(mode=SHARED_READ, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
