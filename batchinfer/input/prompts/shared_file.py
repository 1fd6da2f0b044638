"""Anonymous files through which two processes exchange data that is too large for a pipe.

A pipe buffers about 200 KB. A process that writes more blocks until the other one reads, which may be busy or still
starting.
"""

from __future__ import annotations

import os
import sys
import tempfile

from batchinfer.core.errors import Unavailable

BULK_AT = 4096  # offset of the data; the page before it is for single numbers
_KEPT = 8 << 20  # bytes that may stay allocated after the data was read


def shared_file() -> int:
    """Create an anonymous file to exchange data with another process, and return its descriptor.

    On Linux it is in memory.
    """
    if sys.platform == "linux":
        file = os.memfd_create("batchinfer-render")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, BULK_AT)
    return file


def put(file: int, data: bytes) -> None:
    """Write bytes to a file that `shared_file` created, for `take`. Earlier bytes are overwritten.

    Raises:
        Unavailable: There is not enough memory, or the system allows no file of this size.
    """
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
    """Return the first `size` bytes that `put` wrote to a file that `shared_file` created.

    The result is shorter if another process has truncated the file. A large file is emptied to free its memory.
    """
    parts, at = [], BULK_AT
    while size > 0 and (part := os.pread(file, size, at)):
        parts.append(part)
        at, size = at + len(part), size - len(part)
    if at - BULK_AT > _KEPT:
        os.ftruncate(file, BULK_AT)
    return parts[0] if len(parts) == 1 else b"".join(parts)
