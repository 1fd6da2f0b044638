"""The completion store: finished work by key, append-only, committed in parts.

    part-<seq>-<random>.parquet     completions with zstd and page checksums; columns depend on the kinds of answers
    part-<seq>-<random>.json        its record, written after it: {format, rows, bytes, sha256, numerics}
    uses/                           which completions the results used (uses.py)
    lock                            shared by every run that uses the store, exclusive while files are removed
    order.lock                      held by a run while it numbers a part and writes its record

A part without a record does not exist, nor does a part that another record `replaces` (cleaning.py). A key may be in
several parts. `<seq>` only increases, so the first completion of a key stays the same whatever is added later.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import StorageError
from batchinfer.core.request import Completion, Tokens
from batchinfer.filesystem.digests import file_digests
from batchinfer.filesystem.durable import Digest, DurableFile, FileOps, storage, write_json
from batchinfer.store.answers.parts import COMPLETION_SCHEMA, ENGINE_CLASS
from batchinfer.store.answers.store_lock import StoreLock
from batchinfer.store.answers.uses import temporary_use_files
from batchinfer.store.outputs.registry import KINDS

RECORD_FORMAT = 1
# Minimum rows of a part after PART_SECONDS, and before. Each part costs two flushes to disk when it is written, and the
# opening of a file in every later run, so fast runs write larger parts.
PART_ROWS, MOST_PART_ROWS, PART_SECONDS = 1000, 1 << 15, 1.0
GROUP_ROWS = 8192  # rows per row group
PENDING_BYTES = 64 << 20  # maximum bytes of pending answers in memory; then a part is written early
_NO_RECORDS: Mapping[Path, CommitRecord] = MappingProxyType({})
# Matches the whole name: other programs also write files such as part-00000.parquet, which must not be removed.
_OURS = re.compile(r"part-\d{10}-[0-9a-f]{8}(-[0-9a-f]{8})?\.(parquet|json)(\.tmp)?")


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The commit record of a part of the store: a JSON file next to it. A part exists only with a record.

    Attributes:
        rows: Number of rows of the part.
        bytes: Size of the part's file.
        sha256: Hex digest of the part's file.
        numerics: Version of the numerics that computed the rows.
        replaces: File names of the parts that this part replaced; they no longer exist.
        since: Unix time at which the newest row was committed, if this part replaced others; else None.
    """

    rows: int
    bytes: int
    sha256: str
    numerics: int
    replaces: tuple[str, ...] = ()
    since: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the commit record of a part as a JSON object."""
        took_over = {"replaces": list(self.replaces), "since": self.since} if self.replaces else {}
        return {
            "format": RECORD_FORMAT,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "numerics": self.numerics,
        } | took_over


@dataclass(frozen=True, slots=True)
class DamagedPart:
    """A damaged part of the store, with the kind of damage. Its rows are computed again."""

    path: Path
    reason: str


class CompletionStore:
    """The store of a job's answers, open for appending. A context manager.

    Damaged parts are left out and listed in `discarded`: their size or sha256 differs from the commit record.
    Their files are removed unless another process uses the store.
    """

    def __init__(
        self,
        path: Path,
        *,
        numerics: int = 1,
        rows: int | None = None,
        seconds: float = 30.0,
        verify: bool = False,
        digests: bool = False,
        ops: FileOps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a store, and create its folder if needed.

        Args:
            path: The folder.
            numerics: Version of the numerics, stored in the records of new parts.
            rows: Number of pending rows at which `maybe_commit` commits. None: 32,768, or 1,000 once the
                oldest row has been pending for a second.
            seconds: Maximum seconds that a row is pending.
            verify: Read all parts in full, and compare their sha256 with their records.
            digests: Compare the sha256 as well, but use cached digests of unchanged files.
            ops: File operations.
            clock: Returns the time in seconds.

        Raises:
            StorageError: The store cannot be read or locked.
        """
        self.path = path
        self.discarded: tuple[DamagedPart, ...] = ()
        self._numerics, self._limit, self._seconds = numerics, rows, seconds
        self._ops, self._clock = ops or FileOps(), clock
        self._pending: list[Completion] = []
        self._pending_bytes = 0
        self._oldest: float | None = None
        self._records: dict[Path, CommitRecord] = {}
        self._lock = StoreLock(path, self._ops)
        self._digests = digests
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
        """Return the number of committed rows in the store."""
        return sum(record.rows for record in self._records.values())

    @property
    def pending(self) -> int:
        """Return the number of rows that were appended but not committed yet. A crash would lose them."""
        return len(self._pending)

    def parts(self) -> list[Path]:
        """Return the paths of the store's committed parts, oldest first."""
        return sorted(self._records)

    def rows_by_part(self) -> dict[str, int]:
        """Return the number of rows of each committed part of the store, by file name."""
        return {part.name: record.rows for part, record in self._records.items()}

    def append(self, completions: Iterable[Completion]) -> None:
        """Add completions to the store's pending rows. The next commit makes them durable."""
        new = list(completions)
        self._pending += new
        self._pending_bytes += sum(0 if one.output is None else one.output.held_bytes for one in new)
        if self._pending and self._oldest is None:
            self._oldest = self._clock()

    def maybe_commit(self) -> int:
        """Commit the pending rows if they are many, or large, or if the oldest has waited long enough.

        Return the number of committed rows, or 0 without a commit.
        """
        waited = 0.0 if self._oldest is None else self._clock() - self._oldest
        full = len(self._pending) >= self._min_rows(waited) or self._pending_bytes >= PENDING_BYTES
        return self.commit() if full or (self._pending and waited >= self._seconds) else 0

    def _min_rows(self, waited: float) -> int:
        if self._limit is not None:
            return self._limit
        return PART_ROWS if waited >= PART_SECONDS else MOST_PART_ROWS

    def commit(self) -> int:
        """Write all pending completions as one durable part, and return its number of rows.

        If it raises StorageError, the rows are still pending, and a later commit writes them to a new file.
        """
        if not self._pending:
            return 0
        rows = len(self._pending)
        with self._lock.lock_order() as order:
            last = order.last
            number = 1 + (self._last_number() if last is None else last)
            part = self.path / f"part-{number:010d}-{uuid.uuid4().hex[:8]}.parquet"
            digest = write_table(part, completions_table(self._pending), self._ops)
            record = CommitRecord(rows, digest.bytes, digest.sha256, self._numerics)
            write_json(part.with_suffix(".json"), record.to_json(), self._ops)
            order.note(number)
        self._records[part] = record
        self._pending, self._pending_bytes, self._oldest = [], 0, None
        return rows

    def refresh(self) -> None:
        """Add the parts that other runs committed since the store was opened.

        Parts that are committed after this call come after all existing parts.

        Raises:
            StorageError: A part was damaged since it was opened.
        """
        known = {one.path for one in self.discarded}
        with self._lock.lock_order():
            records, discarded = read_records(self.path, known=self._records)
        self._records = {part: record for part, record in records.items() if part not in known}
        discarded += tuple(_find_differing(self.path, self._records)) if self._digests else ()
        for one in discarded:
            if one.path not in known:
                raise StorageError(
                    f"{one.path}: {one.reason}; the same command drops it, and runs its rows again"
                )

    def close(self) -> None:
        """Release the store's locks. Rows that were not committed are lost."""
        self._lock.close()

    def _last_number(self) -> int:
        return max((int(name.split("-")[1]) for name in _record_names(self.path)), default=-1)

    def _load(self, verify: bool) -> None:
        # With other users, a part without a record is left alone: its run may be about to write the record
        if self._lock.try_exclusive():
            self._records, self.discarded = read_records(self.path, verify=verify, digests=self._digests)
            sweep(self.path, self._records, self._ops)
        self._lock.share()
        if _record_names(self.path) != {part.with_suffix(".json").name for part in self._records}:
            self._records, more = read_records(self.path, verify=verify, digests=self._digests)
            self.discarded += more


def sweep(path: Path, records: Iterable[Path], ops: FileOps) -> None:
    """Remove all parts from the folder of a store, except parts with a valid commit record.

    The removed files are leftovers of a crash, damaged parts and replaced parts. The caller must hold the
    exclusive lock of the store.

    Args:
        path: The folder of the store.
        records: The paths of the valid parts.
        ops: File operations.
    """
    kept = {file for part in records for file in (part, part.with_suffix(".json"))}
    parts = [file for file in sorted(path.glob("part-*")) if _OURS.fullmatch(file.name)]
    for file in (*parts, *temporary_use_files(path)):
        if file not in kept:
            with storage(file, "remove"):
                ops.unlink(file)


def _record_names(path: Path) -> set[str]:
    with storage(path, "list"):
        return {name for name in os.listdir(path) if name.endswith(".json") and _OURS.fullmatch(name)}


def read_records(
    path: Path,
    *,
    verify: bool = False,
    digests: bool = False,
    known: Mapping[Path, CommitRecord] = _NO_RECORDS,
) -> tuple[dict[Path, CommitRecord], tuple[DamagedPart, ...]]:
    """Return the usable parts of a store with their commit records, and the unusable parts with reasons.

    It changes nothing and needs no lock. The size of each part is always compared with its record.

    Args:
        path: The folder of the store.
        verify: Read all parts in full, and compare their sha256 with the records.
        digests: Compare the sha256 as well, but use cached digests of unchanged files.
        known: Commit records that were read before, by part. They are not read again.

    Raises:
        StorageError: A record has a newer format, or the disk fails.
    """
    usable: dict[Path, CommitRecord] = {}
    discarded: list[DamagedPart] = []
    for name in sorted(_record_names(path)):
        part = (path / name).with_suffix(".parquet")
        record = known.get(part) or _read_record(path / name)
        reason = "unreadable record" if record is None else _damage(part, record)
        if record is not None and reason is None:
            usable[part] = record
        else:
            discarded.append(DamagedPart(part, reason or "unreadable record"))
    for lost in _find_differing(path, usable, fresh=verify) if verify or digests else ():
        del usable[lost.path]
        discarded.append(lost)
    replaced = {path / name for record in usable.values() for name in record.replaces}
    return (
        {part: record for part, record in usable.items() if part not in replaced},
        tuple(one for one in discarded if one.path not in replaced),
    )


def _read_record(path: Path) -> CommitRecord | None:
    with storage(path, "read"):
        text = path.read_bytes()
    try:
        raw = json.loads(text)
        version = int(raw["format"])
        record = CommitRecord(
            int(raw["rows"]),
            int(raw["bytes"]),
            str(raw["sha256"]),
            int(raw["numerics"]),
            tuple(map(str, raw.get("replaces", ()))),
            float(raw["since"]) if "since" in raw else None,
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if version > RECORD_FORMAT:
        raise StorageError(
            f"{path}: record format {version}, this version knows up to {RECORD_FORMAT}; "
            "use the batchinfer that wrote it, or another cache.path"
        )
    return record


def _find_differing(
    path: Path, records: Mapping[Path, CommitRecord], *, fresh: bool = False
) -> list[DamagedPart]:
    # With `fresh`, cached digests are ignored, and all parts are read
    with file_digests(path, fresh=fresh) as found:
        return [
            DamagedPart(part, "its sha256 is not the recorded one")
            for part, record in sorted(records.items())
            if found.of(part) != record.sha256
        ]


def _damage(part: Path, record: CommitRecord) -> str | None:
    with storage(part, "read"):
        try:
            size = part.stat().st_size
        except FileNotFoundError:
            return "the part is missing"
    if size != record.bytes:
        return f"{size} bytes, the record says {record.bytes}"
    return None


def write_table(path: Path, rows: pa.Table | pa.RecordBatchReader, ops: FileOps) -> Digest:
    """Write a table to a Parquet file with zstd and page checksums, and sync it to disk.

    Args:
        path: The file.
        rows: The table, or a reader whose batches become row groups.
        ops: File operations.

    Raises:
        StorageError: The file cannot be written.
    """
    file = DurableFile(path, ops)
    batches = rows.to_batches(GROUP_ROWS) if isinstance(rows, pa.Table) else rows
    try:
        writer = pq.ParquetWriter(file, rows.schema, compression="zstd", write_page_checksum=True)
        for batch in batches:
            writer.write_batch(batch)
        writer.close()  # only on success: the footer makes a truncated file look complete
    except BaseException:
        file.abandon()
        raise
    return file.commit()


def completions_table(completions: Sequence[Completion]) -> pa.Table:
    """Return completions as a table for the store.

    Its columns are COMPLETION_SCHEMA and the columns that the kinds of these answers add, such as vectors.
    """
    outputs, errors = [c.output for c in completions], [c.error for c in completions]
    texts = [one if isinstance(one, Tokens) else None for one in outputs]
    columns = [
        pa.array([c.key for c in completions], pa.binary(32)),
        _token_lists(texts),
        pa.array([c.finish_reason for c in completions], pa.string()),
        pa.array([None if one is None else one.text_length for one in texts], pa.int32()),
        pa.array([e.code if e else None for e in errors], pa.string()),
        pa.array([e.error_class if e else None for e in errors], pa.string()),
        pa.array([e.message if e else None for e in errors], pa.string()),
        pa.array([e.retryable if e else None for e in errors], pa.bool_()),
    ]
    fields = list(COMPLETION_SCHEMA)
    for kind in KINDS.values():
        added = kind.arrays([one if isinstance(one, kind.output) else None for one in outputs])
        fields += [kind.stored.field(name) for name in added]
        columns += added.values()
    if any(c.engine_class is not None for c in completions):
        fields.append(ENGINE_CLASS)
        columns.append(pa.array([c.engine_class for c in completions], ENGINE_CLASS.type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _token_lists(texts: Sequence[Tokens | None]) -> pa.ListArray:
    tokens = [_NONE if one is None else np.asarray(one.token_ids, np.int32) for one in texts]
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate([_NONE, *tokens])))


_NONE = np.empty(0, np.int32)
