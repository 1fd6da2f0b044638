"""The completion store: finished work by key, append-only, committed in parts.

    part-<seq>-<random>.parquet     completions, zstd, page checksums; with the columns that a kind of answers adds
    part-<seq>-<random>.json        its record, written after it: {format, rows, bytes, sha256, numerics}
    uses/                           which of them the results used (uses.py)
    lock                            shared by every run that uses the store, exclusive while something is removed
    order.lock                      held while a part gets its number and its record, one run after the other

The record is the only truth: a part without one does not exist, nor does one that another record says it `replaces`
(cleaning.py). A key may stand in several parts; `<seq>` counts up, so that "the first one" stays the same one
whatever is added later.
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
from batchinfer.store.answers.uses import unfinished
from batchinfer.store.outputs.registry import KINDS

RECORD_FORMAT = 1
# A part for every thousand rows, where many thousands finish in a second, costs the run that writes it two flushes to
# the disk each, and every later one the opening of a file.
PART_ROWS, MOST_PART_ROWS, PART_SECONDS = 1000, 1 << 15, 1.0
GROUP_ROWS = 8192  # of a part, which are read at once
PENDING_BYTES = 64 << 20  # of large answers: more than these in memory are written as a part early
_NO_RECORDS: Mapping[Path, CommitRecord] = MappingProxyType({})
# The whole name: other programs call their files part-00000.parquet, too, and theirs are not ours to remove.
_OURS = re.compile(r"part-\d{10}-[0-9a-f]{8}(-[0-9a-f]{8})?\.(parquet|json)(\.tmp)?")


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The record that makes a part exist."""

    rows: int
    bytes: int
    sha256: str
    numerics: int
    replaces: tuple[str, ...] = ()  # names of the parts whose rows this one took over; they no longer exist
    since: float | None = None  # of such a part: when the youngest of its rows was committed, in Unix time

    def to_json(self) -> dict[str, Any]:
        took_over = {"replaces": list(self.replaces), "since": self.since} if self.replaces else {}
        return {
            "format": RECORD_FORMAT,
            "rows": self.rows,
            "bytes": self.bytes,
            "sha256": self.sha256,
            "numerics": self.numerics,
        } | took_over


@dataclass(frozen=True, slots=True)
class Discarded:
    """A part that cannot be used, and why; its rows are computed again."""

    path: Path
    reason: str


class CompletionStore:
    """Open a store for appending; use as a context manager. Raises StorageError.

    A part that has no record, another size than its record says or (with `digests`, and anew with `verify`) another
    sha256 is removed and listed in `discarded`. `rows` and `seconds` say when `maybe_commit` commits; without `rows`,
    some may wait for others that finish within a second. `numerics` goes into the records.
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
        self.path = path
        self.discarded: tuple[Discarded, ...] = ()
        self._numerics, self._limit, self._seconds = numerics, rows, seconds
        self._ops, self._clock = ops or FileOps(), clock
        self._pending: list[Completion] = []
        self._pending_bytes = 0  # that they hold
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
        """Return the number of committed rows."""
        return sum(record.rows for record in self._records.values())

    @property
    def pending(self) -> int:
        """Rows appended and not yet committed: what a crash would cost now."""
        return len(self._pending)

    def parts(self) -> list[Path]:
        """The committed parts, oldest first."""
        return sorted(self._records)

    def rows_by_part(self) -> dict[str, int]:
        """How many rows each committed part has, by its name."""
        return {part.name: record.rows for part, record in self._records.items()}

    def append(self, completions: Iterable[Completion]) -> None:
        """Take completions; they are safe once committed."""
        new = list(completions)
        self._pending += new
        self._pending_bytes += sum(0 if one.output is None else one.output.held_bytes for one in new)
        if self._pending and self._oldest is None:
            self._oldest = self._clock()

    def maybe_commit(self) -> int:
        """Commit when there are enough rows or bytes, or the oldest has waited long enough; rows committed."""
        waited = 0.0 if self._oldest is None else self._clock() - self._oldest
        full = len(self._pending) >= self._enough(waited) or self._pending_bytes >= PENDING_BYTES
        return self.commit() if full or (self._pending and waited >= self._seconds) else 0

    def _enough(self, waited: float) -> int:
        """Return how many rows are worth a part of their own, the oldest of which has waited for so many seconds."""
        if self._limit is not None:
            return self._limit
        return PART_ROWS if waited >= PART_SECONDS else MOST_PART_ROWS

    def commit(self) -> int:
        """Make everything that was appended durable, as one part; rows committed.

        Raises StorageError, in which case the rows are still pending: a later commit writes them to a new
        file.
        """
        if not self._pending:
            return 0
        rows = len(self._pending)
        with self._lock.ordered() as order:
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
        """Know also what other runs have committed since: only then is the first completion of a key the same for
        all, and stays so, because what is committed later gets a higher number.

        Raises StorageError for a part that was damaged meanwhile."""
        known = {one.path for one in self.discarded}
        with self._lock.ordered():
            records, discarded = read_records(self.path, known=self._records)
        self._records = {part: record for part, record in records.items() if part not in known}
        discarded += tuple(_differing(self.path, self._records)) if self._digests else ()
        for one in discarded:
            if one.path not in known:
                raise StorageError(
                    f"{one.path}: {one.reason}; the same command drops it, and runs its rows again"
                )

    def close(self) -> None:
        """Release the store. What was not committed is not kept."""
        self._lock.close()

    def _last_number(self) -> int:
        """The number of the last part that is there, whoever committed it; -1 if there is none."""
        return max((int(name.split("-")[1]) for name in _record_names(self.path)), default=-1)

    def _load(self, verify: bool) -> None:
        """Only who is alone may sweep: another run's part without a record may be about to get one."""
        if self._lock.try_alone():
            self._records, self.discarded = read_records(self.path, verify=verify, digests=self._digests)
            sweep(self.path, self._records, self._ops)
        self._lock.share()
        if _record_names(self.path) != {part.with_suffix(".json").name for part in self._records}:
            self._records, more = read_records(self.path, verify=verify, digests=self._digests)
            self.discarded += more


def sweep(path: Path, records: Iterable[Path], ops: FileOps) -> None:
    """Remove all but these parts: leftovers of a crash, damaged and replaced ones. The caller holds the store alone."""
    kept = {file for part in records for file in (part, part.with_suffix(".json"))}
    parts = [file for file in sorted(path.glob("part-*")) if _OURS.fullmatch(file.name)]
    for file in (*parts, *unfinished(path)):
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
) -> tuple[dict[Path, CommitRecord], tuple[Discarded, ...]]:
    """The usable parts of a store with their records, and what is not usable. Changes nothing, needs no lock.

    Sizes are always compared; with `digests` the sha256 is, too, once for each state of a part; with `verify`, anew.
    Records that are `known` are not read again: none is ever changed.

    Raises StorageError for a record of a newer format, or when the disk does.
    """
    usable: dict[Path, CommitRecord] = {}
    discarded: list[Discarded] = []
    for name in sorted(_record_names(path)):
        part = (path / name).with_suffix(".parquet")
        record = known.get(part) or _read_record(path / name)
        reason = "unreadable record" if record is None else _damage(part, record)
        if record is not None and reason is None:
            usable[part] = record
        else:
            discarded.append(Discarded(part, reason or "unreadable record"))
    for lost in _differing(path, usable, fresh=verify) if verify or digests else ():
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


def _differing(path: Path, records: Mapping[Path, CommitRecord], *, fresh: bool = False) -> list[Discarded]:
    """The parts whose sha256 is not the recorded one."""
    with file_digests(path, fresh=fresh) as found:
        return [
            Discarded(part, "its sha256 is not the recorded one")
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
    """Write a Parquet file durably with zstd and page checksums. Raises StorageError."""
    file = DurableFile(path, ops)
    batches = rows.to_batches(GROUP_ROWS) if isinstance(rows, pa.Table) else rows
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
    """Completions as a table of COMPLETION_SCHEMA, with the columns that their kinds add."""
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
    """Return the token ids of each; none for an answer that is no text."""
    tokens = [_NONE if one is None else np.asarray(one.token_ids, np.int32) for one in texts]
    ends = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate([_NONE, *tokens])))


_NONE = np.empty(0, np.int32)
