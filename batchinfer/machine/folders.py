"""Creates folders that only their owner can write to, independent of the umask."""

from __future__ import annotations

from pathlib import Path

SHARED_READ = 0o755


def make_folder(path: Path, mode: int = SHARED_READ) -> None:
    """Create a folder and its missing parents.

    Missing parents get the mode SHARED_READ, even with an umask of 0. `Path.mkdir(parents=True)` would use 0777.

    Args:
        path: The folder. It may exist.
        mode: The permissions of the folder, before the umask is applied.

    Raises:
        OSError: A folder cannot be created, or there is a file in its place.
    """
    for above in reversed(path.parents):
        if not above.exists():
            above.mkdir(mode=SHARED_READ, exist_ok=True)
    path.mkdir(mode=mode, exist_ok=True)
