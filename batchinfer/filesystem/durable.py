"""Durable writes: a file appears under its name completely or not at all, even if the machine crashes.

Every operation that changes the disk is a method of `FileOps`, so tests can make each of them fail.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.errors import OutputConflict, StorageError
from batchinfer.core.wording import sizes
from batchinfer.machine.folders import make_folder

TEMPORARY = ".tmp"
_WRITE_BYTES = 1 << 20  # buffer size; Parquet files are written in small pieces, 4 per column chunk
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class ExchangeUnsupported(OSError):
    """An error: the platform or file system cannot swap two folders atomically."""


class FileOps:
    """The operations that change files and folders, one method each. Tests override them to inject faults."""

    def open(self, path: Path) -> int:
        """Create or truncate a file for writing, and return its file descriptor.

        Other users may read the file. Prompts are protected by the mode of the state folder around it.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and return its file descriptor.

        A symbolic link with this name is not followed but is an error, since another user may have created
        it.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        """Write bytes to a file descriptor, and return the number of bytes written."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Write the data of the file with this descriptor to disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a file descriptor."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or an entire folder."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link. Raises FileExistsError if the name is taken."""
        os.link(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two folders atomically. Raises ExchangeUnsupported if that is not possible."""
        _exchange(one, other)

    def unlink(self, path: Path) -> None:
        """Remove a file if it exists."""
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        """Create a folder and its parents, unless it exists."""
        make_folder(path, mode)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its contents."""
        shutil.rmtree(path)

    def touch(self, path: Path) -> None:
        """Set the times of a file or folder to now."""
        os.utime(path)

    def fsync_folder(self, path: Path) -> None:
        """Write the entries of a folder to disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _exchange(one: Path, other: Path) -> None:
    if sys.platform != "linux":
        raise ExchangeUnsupported(errno.ENOSYS, "folders cannot be exchanged on this platform")
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise ExchangeUnsupported(errno.ENOSYS, "this C library has no renameat2")
    done = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if done == 0:
        return
    code = ctypes.get_errno()
    kind = ExchangeUnsupported if code in _NO_EXCHANGE else OSError
    raise kind(code, os.strerror(code), str(one))


@contextmanager
def storage(path: Path, doing: str) -> Iterator[None]:
    """Convert an OSError within the block to a StorageError that names the path, the operation and the errno.

    Args:
        path: The path.
        doing: The operation as a verb, such as "read", for the message "cannot read".
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot {doing}: {describe(error)}{next_step(error)}") from error


def describe(error: OSError) -> str:
    """Return the system's message and the name of the errno, such as `No space left on device (ENOSPC)`."""
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


def next_step(error: OSError) -> str:
    """Return advice for the user after an error of the disk, as the end of a sentence; "" without advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "; make room on that disk, then run the same command again: it continues where this one stopped"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Digest:
    """The size in bytes and the sha256 (hex) of a written file."""

    bytes: int
    sha256: str


class DurableFile:
    """A binary file for sequential writing.

    It has a temporary name until `commit()` makes it durable and renames it. It implements the part of
    Python's file protocol that `pyarrow.parquet.ParquetWriter` needs. Every method raises StorageError. If an
    fsync fails, the file is discarded. The caller may write the same content to a new file.
    """

    def __init__(self, path: Path, ops: FileOps, temporary: Path | None = None) -> None:
        """Create a file with a temporary name, which `commit` renames.

        Args:
            path: The final name.
            ops: File operations.
            temporary: The temporary name; an existing file with this name is replaced. None: `path` with a
                fixed suffix. In folders that others write to, pass a unique name instead.
        """
        self.path = path
        self.temporary = temporary or path.with_name(path.name + TEMPORARY)
        self.closed = False
        self._ops = ops
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._buffer = bytearray()
        self._abandoned = False
        with storage(self.temporary, "create"):
            if temporary is None:
                self._fd = ops.open(self.temporary)
            else:
                ops.unlink(temporary)  # left by a killed run
                self._fd = ops.create(temporary)

    def write(self, data: Any) -> int:
        """Add all bytes of a bytes-like object to the file, and return their number.

        Small writes are buffered.
        """
        if self._abandoned:  # ParquetWriter's destructor still writes a footer
            return len(data)
        self._buffer += data
        if len(self._buffer) >= _WRITE_BYTES:
            self.drain()
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written so far, including buffered bytes."""
        return self._bytes + len(self._buffer)

    def flush(self) -> None:
        """Do nothing, as only `commit` makes data durable. ParquetWriter calls this method."""

    def writable(self) -> bool:
        """Return True because the file can be written."""
        return True

    def readable(self) -> bool:
        """Return False because the file cannot be read."""
        return False

    def seekable(self) -> bool:
        """Return False because the file is written sequentially."""
        return False

    def close(self) -> None:
        """Discard the file unless it was committed."""
        if not self.closed:
            self.abandon()

    def flush_to_disk(self) -> Digest:
        """Write and sync all bytes under the temporary name, and return the size and digest."""
        self.drain()
        with storage(self.temporary, "fsync"):
            self._ops.fsync(self._fd)
        return Digest(self._bytes, self._hash.hexdigest())

    def commit(self, announce: Callable[[Digest], None] | None = None) -> Digest:
        """Sync and close the file, rename it to its final name, and return its size and digest.

        The file is discarded after an error.

        Args:
            announce: Called with the digest just before the rename, for example to record it. If it raises,
                the file is discarded as well.
        """
        return self._commit(announce, self._ops.rename)

    def commit_new(self) -> Digest:
        """Commit the file like `commit`, unless its final name is taken. Then raise OutputConflict.

        Return its size and digest.
        """
        return self._commit(None, self._put_if_absent)

    def _commit(self, announce: Callable[[Digest], None] | None, put: Callable[[Path, Path], None]) -> Digest:
        try:
            digest = self.flush_to_disk()
            self._close_descriptor()
            if announce is not None:
                announce(digest)
            with storage(self.path, "rename to"):
                put(self.temporary, self.path)
            with storage(self.path.parent, "fsync"):
                self._ops.fsync_folder(self.path.parent)
        except BaseException:
            self.abandon()  # no second fsync: Linux may report the error only once and drop the data
            raise
        self.closed = True
        return digest

    def _put_if_absent(self, source: Path, target: Path) -> None:
        # Without hard links, the check and the rename are not atomic
        try:
            self._ops.link(source, target)
        except FileExistsError:
            raise _exists_error(target) from None
        except OSError:
            refuse_existing(target)
            self._ops.rename(source, target)
        else:
            self._ops.unlink(source)

    def abandon(self) -> None:
        """Close and remove the unfinished file. Errors of the disk are ignored, and so are later writes."""
        self._abandoned = True
        self.closed = True
        for undo in (self._close_descriptor, self._remove):
            try:
                undo()
            except StorageError:  # report the original error; a leftover .tmp file is removed later
                continue

    def drain(self) -> None:
        """Write the buffered bytes to the temporary file, without syncing it."""
        data, self._buffer = bytes(self._buffer), bytearray()
        self._hash.update(data)
        self._bytes += len(data)
        rest = memoryview(data)
        with storage(self.temporary, "write"):
            while len(rest):
                rest = rest[self._ops.write(self._fd, rest) :]

    def _close_descriptor(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with storage(self.temporary, "close"):
                self._ops.close(fd)

    def _remove(self) -> None:
        with storage(self.temporary, "remove"):
            self._ops.unlink(self.temporary)


def write_bytes(path: Path, data: bytes, ops: FileOps) -> Digest:
    """Write a small file, sync it to disk, and return its size and digest. Raises StorageError.

    A file with the same name is replaced atomically.
    """
    file = DurableFile(path, ops)
    try:
        file.write(data)
    except BaseException:
        file.abandon()
        raise
    return file.commit()


def write_new(path: Path, pieces: Iterable[bytes], ops: FileOps) -> Digest:
    """Create a file, sync it to disk, and return its size and digest. An existing file is never replaced.

    The folder may be one that other users write to.

    Args:
        path: The file.
        pieces: Its content, in pieces.
        ops: File operations.

    Raises:
        OutputConflict: The name is taken.
        StorageError: The file cannot be written.
    """
    refuse_existing(path)
    file = DurableFile(path, ops, path.with_name(f".batchinfer-{uuid.uuid4().hex[:16]}{TEMPORARY}"))
    try:
        for piece in pieces:
            file.write(piece)
        return file.commit_new()
    finally:
        file.close()


def refuse_existing(path: Path) -> None:
    """Raise OutputConflict if there is anything at the path, even a broken link."""
    if os.path.lexists(path):
        raise _exists_error(path)


def _exists_error(path: Path) -> OutputConflict:
    return OutputConflict(f"{path}: is there already; choose another name, or move it away")


def write_json(path: Path, value: object, ops: FileOps) -> Digest:
    """Write a value as canonical, readable JSON, sync the file to disk, and return its size and digest.

    A file with the same name is replaced atomically. Raises StorageError.
    """
    return write_bytes(path, json_text(value), ops)


def json_text(value: object) -> bytes:
    """Return a value as canonical, readable JSON in UTF-8: sorted keys, indented, with a final newline."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def replace_bytes(path: Path, content: bytes, ops: FileOps) -> None:
    """Write a small file atomically: readers see the complete old or the complete new content.

    Nothing is synced: after a power failure, the file may have its old content or be missing. Raises
    StorageError.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    data = memoryview(content)
    with storage(path, "write"):
        fd = ops.open(temporary)
        try:
            while len(data):
                data = data[ops.write(fd, data) :]
        finally:
            ops.close(fd)
        ops.rename(temporary, path)


def check_free_space(folder: Path, needed_bytes: int, needing: str, remedy: str) -> None:
    """Check that a disk has enough free space. Raises StorageError.

    Args:
        folder: A folder on the disk, which need not exist.
        needed_bytes: The bytes that must be free.
        needing: The start of the message, before the number of bytes, such as `/d/res: the job needs about`.
        remedy: The end of the message: advice other than making room.
    """
    place = next(one for one in (folder, *folder.parents) if one.exists())
    with storage(place, "ask for free space"):
        free = shutil.disk_usage(place).free
    if free < needed_bytes:
        needs, has = sizes(needed_bytes, free)
        raise StorageError(f"{needing} {needs} of disk, {has} are free; make room, or {remedy}")


def sha256_of(path: Path, chunk_bytes: int = 1 << 20) -> str:
    """Return the sha256 (hex) of a file. Raises StorageError."""
    digest = hashlib.sha256()
    with storage(path, "read"), path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()
