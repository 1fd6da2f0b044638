"""Nameless files through which two processes hand each other what is too large for a pipe.

A pipe holds some 200 KB: whoever writes more waits until the other process runs, and that may be busy or starting.
"""

from __future__ import annotations

import os
import sys
import tempfile

from batchinfer.core.errors import Unavailable

BULK_AT = 4096  # before it there is a page for single numbers
_KEPT = 8 << 20  # bytes; memory beyond it is given back once they were taken


def shared_file() -> int:
    """The descriptor of a nameless file, in memory where the system has such files."""
    if sys.platform == "linux":
        file = os.memfd_create("batchinfer-render")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, BULK_AT)
    return file


def put(file: int, data: bytes) -> None:
    """Write the data over what was there. Raises Unavailable where the system does not allow a file of that size."""
    left = memoryview(data)
    at = BULK_AT
    try:
        while left:
            written = os.pwrite(file, left, at)
            at, left = at + written, left[written:]
    except OSError as error:
        raise Unavailable(
            f"{len(data):,} bytes of rows cannot be handed to another process: {error.strerror}; they need as much "
            "memory, and a limit on the size of files (ulimit -f) that allows them"
        ) from error


def take(file: int, size: int) -> bytes:
    """Return a copy of the first `size` bytes of the data, or of as many as there are: the other process may change
    the file at any time."""
    parts, at = [], BULK_AT
    while size > 0 and (part := os.pread(file, size, at)):
        parts.append(part)
        at, size = at + len(part), size - len(part)
    if at - BULK_AT > _KEPT:
        os.ftruncate(file, BULK_AT)
    return parts[0] if len(parts) == 1 else b"".join(parts)
