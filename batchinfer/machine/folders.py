"""Creates folders that only their owner can write to, independent of the umask."""

from __future__ import annotations

from pathlib import Path

SHARED_READ = 0o755


def make_folder(path: Path, mode: int = SHARED_READ) -> None:
    """Create a folder and its missing parents, whose permissions are SHARED_READ. Do nothing if the folder exists.

    Args:
        path: The folder.
        mode: The permissions of the folder, before the umask is applied.

    Raises:
        OSError: A folder cannot be created, or there is a file in its place.
    """
    # Path.mkdir(parents=True) would create parents with 0777 if the umask is 0
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(mode=SHARED_READ, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
