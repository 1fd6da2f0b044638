"""Temporary folders that a killed process leaves behind only until the next command that needs one."""

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
# Between being made and being locked a folder is nobody's for an instant.
_YOUNG_S = 60.0


@contextmanager
def temporary_folder(name: str) -> Iterator[str]:
    """A folder in TMPDIR with this name and something random. It is removed afterwards; where this process is killed,
    by the next one that needs a folder, of whatever name. Raises OSError."""
    _remove_left(Path(tempfile.gettempdir()))
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{name}-", suffix=_SUFFIX)
        held = os.open(made.name, os.O_RDONLY)
        stack.callback(os.close, held)  # once it is removed
        _lock(held)  # where the file system has no locks, nothing of its folders is ever removed by others
        yield stack.enter_context(made)


def _lock(folder: int) -> bool:
    """Whether nobody else holds it. The lock goes with the process."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_left(parent: Path) -> None:
    """Remove this user's folders whose processes are gone."""
    for folder in parent.glob(f"{_PREFIX}*{_SUFFIX}"):
        if not _OURS.fullmatch(folder.name):
            continue
        try:
            found = folder.lstat()
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _YOUNG_S:
                continue
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, no folder, or not to be read: it is not ours to remove
            continue
        try:
            if _lock(held):
                shutil.rmtree(
                    folder, ignore_errors=True
                )  # what cannot be removed now is tried again by the next
        finally:
            os.close(held)
