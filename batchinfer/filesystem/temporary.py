"""Creates temporary folders. If a process is killed, the next command that needs one removes its folder."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PREFIX, _SUFFIX = "batchinfer-", ".tmp"
_OURS = re.compile(r"batchinfer-[a-z-]+-[a-z0-9_]{8}\.tmp")
# Minimum age in seconds of folders to remove: a new folder is not locked for a moment.
_YOUNG_S = 60.0


@contextmanager
def temporary_folder(name: str) -> Iterator[str]:
    """Create a folder in TMPDIR, yield its path, and remove it when the block ends. Raises OSError.

    If this process is killed, the next process that needs a temporary folder removes it.

    Args:
        name: A word in the folder's name, which also has a random suffix.
    """
    _remove_left(Path(tempfile.gettempdir()))
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{name}-", suffix=_SUFFIX)
        held = os.open(made.name, os.O_RDONLY)
        stack.callback(os.close, held)  # runs after the folder is removed
        _lock(held)  # without locks in the file system, folders of killed processes are never removed
        yield stack.enter_context(made)


def _lock(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        if not _OURS.fullmatch(folder.name):
            continue
        try:
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _YOUNG_S:
                continue
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed by another process, not a folder, or not readable
            continue
        try:
            if _lock(held):
                shutil.rmtree(folder, ignore_errors=True)  # the next process tries again to remove the rest
        finally:
            os.close(held)
