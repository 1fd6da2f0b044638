"""Durable writes: a file appears whole under its name, or not at all, whatever instant the machine dies.

Every operation that changes the disk goes through `FileOps`, so that a test can make any one of them fail.
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
_WRITE_BYTES = 1 << 20  # a Parquet file is written in hundreds of small pieces, 4 a column chunk
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


class ExchangeUnsupported(OSError):
    """This platform or file system cannot swap two folders in one step."""


class FileOps:
    """The operations that change the disk, one method each; a fault-injecting test overrides them."""

    def open(self, path: Path) -> int:
        """A new file for writing; what keeps prompts private is the mode of the state folder around it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def create(self, path: Path) -> int:
        """As `open`, for a file that must not be there: in a folder that others use, nothing is written through."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file. Raises FileExistsError where the name is taken."""
        os.link(source, target)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two folders in one step. Raises ExchangeUnsupported where that cannot be done."""
        _exchange(one, other)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        make_folder(path, mode)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def touch(self, path: Path) -> None:
        os.utime(path)

    def fsync_folder(self, path: Path) -> None:
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
    """Turn an OSError raised inside into a StorageError that names `path`, what was tried and the errno."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot {doing}: {describe(error)}{way_out(error)}") from error


def describe(error: OSError) -> str:
    """The system's words and the errno's name, e.g. `No space left on device (ENOSPC)`."""
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


def way_out(error: OSError) -> str:
    """The next step for an error that has one, as the end of a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "; make room on that disk, then run the same command again: it continues where this one stopped"
        )
    return ""


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a written file: its size in bytes and its sha256 in hex."""

    bytes: int
    sha256: str


class DurableFile:
    """A binary file for sequential writing that takes its name only in `commit()`.

    Python's file protocol as far as `pyarrow.parquet.ParquetWriter` needs it. Every method raises StorageError.
    A failed fsync is final: Linux may report it once and drop the pages, so the file is given up, never
    fsynced again; whoever holds the rows may write them anew under the same name.

    `temporary` is what the file is called until then. The default suits folders that are ours alone; in any other it
    could be somebody's file: give a name that nobody else uses, which is made anew.
    """

    def __init__(self, path: Path, ops: FileOps, temporary: Path | None = None) -> None:
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
                ops.unlink(temporary)  # left by a run that was killed
                self._fd = ops.create(temporary)

    def write(self, data: Any) -> int:
        """Take all of a bytes-like object; it reaches the disk in large pieces."""
        if self._abandoned:  # ParquetWriter's destructor writes a footer: it must reach nobody
            return len(data)
        self._buffer += data
        if len(self._buffer) >= _WRITE_BYTES:
            self.drain()
        return len(data)

    def tell(self) -> int:
        return self._bytes + len(self._buffer)

    def flush(self) -> None:
        """Nothing to do: only `commit` promises anything."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Give the file up unless it was committed."""
        if not self.closed:
            self.abandon()

    def flush_to_disk(self) -> Digest:
        """Everything that was written so far is on the disk, under the temporary name."""
        self.drain()
        with storage(self.temporary, "fsync"):
            self._ops.fsync(self._fd)
        return Digest(self._bytes, self._hash.hexdigest())

    def commit(self, announce: Callable[[Digest], None] | None = None) -> Digest:
        """fsync, close, rename to the final name, fsync the folder. On failure the file is given up.

        `announce` hears the digest just before the rename; what it raises gives the file up, too.
        """
        return self._commit(announce, self._ops.rename)

    def commit_new(self) -> Digest:
        """As `commit`, but never in the place of another file. Raises OutputConflict where there is one."""
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
            self.abandon()
            raise
        self.closed = True
        return digest

    def _put_if_absent(self, source: Path, target: Path) -> None:
        """A rename would replace what is there. Without hard links there is a moment between look and rename."""
        try:
            self._ops.link(source, target)
        except FileExistsError:
            raise _taken(target) from None
        except OSError:
            refuse_existing(target)
            self._ops.rename(source, target)
        else:
            self._ops.unlink(source)

    def abandon(self) -> None:
        """Close and remove what was written; later writes go nowhere. Never raises for a failing disk."""
        self._abandoned = True
        self.closed = True
        for undo in (self._close_descriptor, self._remove):
            try:
                undo()
            except StorageError:  # the error that led here is the one to report; a leftover .tmp is swept
                continue

    def drain(self) -> None:
        """Write the buffer, however many system calls it takes."""
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
    """Write a small file durably. Raises StorageError."""
    file = DurableFile(path, ops)
    try:
        file.write(data)
    except BaseException:
        file.abandon()
        raise
    return file.commit()


def write_new(path: Path, pieces: Iterable[bytes], ops: FileOps) -> Digest:
    """Write a file that must not be there yet, durably, into a folder that others use, too.

    Raises OutputConflict where the name is taken, StorageError.
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
    """Raises OutputConflict when there is anything under this name, be it a link that leads nowhere."""
    if os.path.lexists(path):
        raise _taken(path)


def _taken(path: Path) -> OutputConflict:
    return OutputConflict(f"{path}: is there already; choose another name, or move it away")


def write_json(path: Path, value: object, ops: FileOps) -> Digest:
    """Write canonical, readable JSON durably. Raises StorageError."""
    return write_bytes(path, json_text(value), ops)


def json_text(value: object) -> bytes:
    """Canonical, readable JSON: sorted keys, final newline."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def replace_bytes(path: Path, content: bytes, ops: FileOps) -> None:
    """Write a small file such that a reader sees the old file or the new one whole. Raises StorageError.

    Nothing is synced: after a power failure the file may be the old one, or gone.
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


def check_free_space(folder: Path, needed_bytes: int, needing: str, way_out: str) -> None:
    """Raises StorageError when the disk of `folder`, which need not be there yet, has less than `needed_bytes` free.

    The message begins with `needing`, e.g. `/d/res: the job needs about`, and ends with `way_out`.
    """
    place = next(one for one in (folder, *folder.parents) if one.exists())
    with storage(place, "ask for free space"):
        free = shutil.disk_usage(place).free
    if free < needed_bytes:
        needs, has = sizes(needed_bytes, free)
        raise StorageError(f"{needing} {needs} of disk, {has} are free; make room, or {way_out}")


def sha256_of(path: Path, chunk_bytes: int = 1 << 20) -> str:
    """The sha256 (hex) of a file's bytes. Raises StorageError."""
    digest = hashlib.sha256()
    with storage(path, "read"), path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()
