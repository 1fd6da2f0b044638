"""The completion store: finished work by key, append-only, committed in parts.

    part-<seq>-<random>.parquet     completions, zstd, page checksums
    part-<seq>-<random>.json        its record, written after it: {format, rows, bytes, sha256, numerics}
    lock                            shared by every run that uses the store, exclusive while leftovers are
    swept

The record is the only truth: a part without one does not exist. A key may stand in several parts; `<seq>`
counts up, so that "the first one" stays the same one whatever is added later.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.durable import Digest, DurableFile, FileOps, sha256_of, storage, write_json
from batchinfer.errors import StorageError
from batchinfer.request import Completion

RECORD_FORMAT = 1
# The whole name: other programs call their files part-00000.parquet, too, and theirs are not ours to remove.
_OURS = re.compile(r"part-\d{10}-[0-9a-f]{8}\.(parquet|json)(\.tmp)?")
COMPLETION_SCHEMA = pa.schema(
    [
        ("key", pa.binary(32)),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("text_length", pa.int32()),
        ("error_code", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("retryable", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What makes a part exist."""

    rows: int
    bytes: int
    sha256: str
    numerics: int

    def to_json(self) -> dict[str, Any]:
        return {
            "format": RECORD_FORMAT,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "numerics": self.numerics,
        }


@dataclass(frozen=True, slots=True)
class Discarded:
    """A part that cannot be used, and why; its rows are computed again."""

    path: Path
    reason: str


class CompletionStore:
    """Open a store for appending; use as a context manager. Raises StorageError.

    A part that has no record, another size than its record says or (with `verify`) another sha256 is
    removed and listed in `discarded`. `rows` and `seconds` say when `maybe_commit` commits; `numerics` goes
    into the records.
    """

    def __init__(
        self,
        path: Path,
        *,
        numerics: int = 1,
        rows: int = 1000,
        seconds: float = 30.0,
        verify: bool = False,
        ops: FileOps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.discarded: tuple[Discarded, ...] = ()
        self._numerics, self._limit, self._seconds = numerics, rows, seconds
        self._ops, self._clock = ops or FileOps(), clock
        self._pending: list[Completion] = []
        self._oldest: float | None = None
        self._records: dict[Path, CommitRecord] = {}
        self._lock_fd = self._open_lock()
        try:
            self._load(verify)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CompletionStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Committed rows."""
        return sum(record.rows for record in self._records.values())

    @property
    def pending(self) -> int:
        """Rows appended and not yet committed: what a crash would cost now."""
        return len(self._pending)

    def parts(self) -> list[Path]:
        """The committed parts, oldest first."""
        return sorted(self._records)

    def append(self, completions: Iterable[Completion]) -> None:
        """Take completions; they are safe once committed."""
        self._pending.extend(completions)
        if self._pending and self._oldest is None:
            self._oldest = self._clock()

    def maybe_commit(self) -> int:
        """Commit when there are enough rows, or the oldest has waited long enough; rows committed."""
        waited = 0.0 if self._oldest is None else self._clock() - self._oldest
        due = len(self._pending) >= self._limit or (self._pending and waited >= self._seconds)
        return self.commit() if due else 0

    def commit(self) -> int:
        """Make everything that was appended durable, as one part; rows committed.

        Raises StorageError, in which case the rows are still pending: a later commit writes them to a new
        file.
        """
        if not self._pending:
            return 0
        rows = len(self._pending)
        part = self.path / self._next_name()
        digest = write_table(part, completions_table(self._pending), self._ops)
        record = CommitRecord(rows, digest.bytes, digest.sha256, self._numerics)
        write_json(part.with_suffix(".json"), record.to_json(), self._ops)
        self._records[part] = record
        self._pending, self._oldest = [], None
        return rows

    def close(self) -> None:
        """Release the store. What was not committed is not kept."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _next_name(self) -> str:
        last = max((int(part.name.split("-")[1]) for part in self._records), default=-1)
        return f"part-{last + 1:010d}-{uuid.uuid4().hex[:8]}.parquet"

    def _open_lock(self) -> int:
        with storage(self.path, "create"):
            self._ops.mkdir(self.path, 0o700)
        with storage(self.path / "lock", "open"):
            return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _load(self, verify: bool) -> None:
        alone = self._try_alone()
        self._records, self.discarded = read_records(self.path, verify=verify)
        if alone:
            self._sweep()
        with storage(self.path / "lock", "lock"):
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)

    def _try_alone(self) -> bool:
        """Only who is alone may sweep: another run's part without a record may be about to get one."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _sweep(self) -> None:
        kept = {path for part in self._records for path in (part, part.with_suffix(".json"))}
        for path in sorted(self.path.glob("part-*")):
            if path not in kept and _OURS.fullmatch(path.name):
                with storage(path, "remove"):
                    self._ops.unlink(path)


def read_records(
    path: Path, *, verify: bool = False
) -> tuple[dict[Path, CommitRecord], tuple[Discarded, ...]]:
    """The usable parts of a store with their records, and what is not usable. Changes nothing, needs no lock.

    Raises StorageError for a record of a newer format, or when the disk does.
    """
    usable: dict[Path, CommitRecord] = {}
    discarded: list[Discarded] = []
    with storage(path, "list"):
        records = sorted(found for found in path.glob("part-*.json") if _OURS.fullmatch(found.name))
    for record_path in records:
        part = record_path.with_suffix(".parquet")
        record = _read_record(record_path)
        reason = "unreadable record" if record is None else _damage(part, record, verify)
        if record is not None and reason is None:
            usable[part] = record
        else:
            discarded.append(Discarded(part, reason or "unreadable record"))
    return usable, tuple(discarded)


def _read_record(path: Path) -> CommitRecord | None:
    with storage(path, "read"):
        text = path.read_bytes()
    try:
        raw = json.loads(text)
        version = int(raw["format"])
        fields = (int(raw["rows"]), int(raw["bytes"]), str(raw["sha256"]), int(raw["numerics"]))
    except (ValueError, KeyError, TypeError):
        return None
    if version > RECORD_FORMAT:
        raise StorageError(
            f"{path}: record format {version}, this version knows up to {RECORD_FORMAT}; "
            "use the batchinfer that wrote it, or another cache.path"
        )
    return CommitRecord(*fields)


def _damage(part: Path, record: CommitRecord, verify: bool) -> str | None:
    if not part.exists():
        return "the part is missing"
    with storage(part, "read"):
        size = part.stat().st_size
    if size != record.bytes:
        return f"{size} bytes, the record says {record.bytes}"
    if verify and sha256_of(part) != record.sha256:
        return "its sha256 is not the recorded one"
    return None


def write_table(path: Path, rows: pa.Table | pa.RecordBatchReader, ops: FileOps) -> Digest:
    """Write a Parquet file durably with zstd and page checksums. Raises StorageError."""
    file = DurableFile(path, ops)
    batches = rows.to_batches() if isinstance(rows, pa.Table) else rows
    try:
        writer = pq.ParquetWriter(file, rows.schema, compression="zstd", write_page_checksum=True)
        for batch in batches:
            writer.write_batch(batch)
        writer.close()  # on success only: closing writes the footer that makes a truncated file look whole
    except BaseException:
        file.abandon()
        raise
    return file.commit()


def completions_table(completions: Sequence[Completion]) -> pa.Table:
    """Completions as a table in the store's schema."""
    lengths = np.array([0, *(len(c.token_ids) for c in completions)], np.int64)
    tokens = [np.asarray(c.token_ids, np.int32) for c in completions]
    flat = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
    token_ids = pa.ListArray.from_arrays(pa.array(np.cumsum(lengths).astype(np.int32)), pa.array(flat))
    errors = [c.error for c in completions]
    columns = [
        pa.array([c.key for c in completions], pa.binary(32)),
        token_ids,
        pa.array([c.finish_reason for c in completions], pa.string()),
        pa.array([c.text_length for c in completions], pa.int32()),
        pa.array([e.code if e else None for e in errors], pa.string()),
        pa.array([e.error_class if e else None for e in errors], pa.string()),
        pa.array([e.message if e else None for e in errors], pa.string()),
        pa.array([e.retryable if e else None for e in errors], pa.bool_()),
    ]
    return pa.Table.from_arrays(columns, schema=COMPLETION_SCHEMA)
