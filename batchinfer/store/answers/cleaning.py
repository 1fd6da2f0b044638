"""Cleaning a completion store: completions that no result has used lately are dropped, small parts become one.

Only for a process that holds the store alone. What stays of a part is copied into a new one; the durable steps are

    1. the uses of the old parts' rows are noted for the new part, too      (of a part that is not there: no meaning)
    2. the new part is written                                              (without a record: does not exist)
    3. its record, which names the parts that it replaces                   (from here on those do not exist)
    4. the records of the old parts are removed, then the old parts

so that a crash at any instant leaves every kept completion once. A part of which nothing stays loses its record first.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import Locked, StorageError
from batchinfer.filesystem.digests import file_digests
from batchinfer.filesystem.durable import FileOps, storage, write_json
from batchinfer.filesystem.rebatch import rebatch
from batchinfer.store.answers.completion_store import (
    GROUP_ROWS,
    CommitRecord,
    read_records,
    sweep,
    write_table,
)
from batchinfer.store.answers.parts import COMPLETION_SCHEMA, ENGINE_CLASS, damaged, padded, schema_of
from batchinfer.store.answers.store_lock import StoreLock
from batchinfer.store.answers.uses import Mask, User, Uses, read_uses, use_files, write_uses

_PART_ROWS = 50_000  # the most rows of a new part
_LARGE_GROUP_ROWS = 256  # where rows have columns of their kind, which may take a megabyte each
_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Policy:
    """The thresholds from which a part is worth rewriting."""

    dropped_share: float  # of a part's rows
    small_rows: int  # a part with fewer rows may be joined with its neighbours,
    joined: int  # small parts in a row that are worth joining
    use_files: int  # that become one


# After a nightly run: a store holds at most a third more than is wanted, and copies a completion a few times at most.
# Parts of 1,000 rows, as commit.rows makes them, are left as they are: joining a million rows of them took 25 s (two
# loaded cores), and saved 0.4 s of every start.
CHEAP = Policy(dropped_share=0.25, small_rows=1000, joined=32, use_files=16)
THOROUGH = Policy(dropped_share=0.0, small_rows=10_000, joined=2, use_files=1)


@dataclass(frozen=True, slots=True)
class Keep:
    """How long completions that no result uses stay."""

    days: int | None  # for what `job` used, and since it was committed; None: for ever
    job: str | None = None  # the results root whose days these are; other jobs' are stored with their uses
    now: float = field(default_factory=time.time)  # Unix time

    def from_(self, user: User | None) -> float:
        """A use by `user` (None: that it was committed) counts if it is later than this, in Unix time."""
        days = self.days if user is None or user.job == self.job else user.keep
        return 0.0 if days is None else max(self.now - days * _DAY_S, 0.0)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The effect of cleaning a store, or of a dry run."""

    rows_kept: int
    rows_dropped: int
    parts_before: int
    parts_after: int
    bytes_freed: int


@dataclass(frozen=True)
class _Source:
    """A part and which of its rows stay."""

    path: Path
    record: CommitRecord
    stay: Mask

    @cached_property
    def rows(self) -> int:
        return int(self.stay.sum())

    @property
    def dropped_share(self) -> float:
        return 1 - self.rows / self.record.rows


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """Parts that become one; those of which nothing stays have no target."""

    sources: tuple[_Source, ...]
    target: Path | None = None


def clean_store(
    store: Path,
    keep: Keep,
    policy: Policy = THOROUGH,
    *,
    dry_run: bool = False,
    go_on: Callable[[], bool] = lambda: True,
    ops: FileOps | None = None,
) -> Cleaned:
    """Drop what `keep` does not protect and join small parts, as far as `policy` finds it worth the copying.

    `go_on` is asked between two parts. Raises Locked while somebody uses the store (not with `dry_run`, which changes
    nothing), StorageError.
    """
    if not store.is_dir():
        return Cleaned(0, 0, 0, 0, 0)
    if dry_run:
        records, _ = read_records(store)
        return _foreseen(records, _plan(records, read_uses(store).renewed(), keep, policy))
    lock = StoreLock(store, ops or FileOps())
    try:
        if not lock.try_alone():
            raise Locked(f"{store}: a run is using the stored answers; try again when it is done")
        return _clean(store, keep, policy, go_on, ops or FileOps())
    finally:
        lock.close()


def _clean(store: Path, keep: Keep, policy: Policy, go_on: Callable[[], bool], ops: FileOps) -> Cleaned:
    records, _ = read_records(store)
    sweep(store, records, ops)
    left = dict(records)
    if _may_gain(store, records, keep, policy):
        uses = read_uses(store).renewed()
        todo = _plan(records, uses, keep, policy)
        if todo or len(use_files(store)) > policy.use_files:
            _join_uses(store, uses, records, todo, keep, ops)
        for rewrite in todo:
            if not go_on():
                break
            left |= _rewritten(rewrite, ops)
            for source in rewrite.sources:
                del left[source.path]
    return _difference(records, left)


def _difference(before: Mapping[Path, CommitRecord], after: Mapping[Path, CommitRecord]) -> Cleaned:
    rows = sum(record.rows for record in before.values()), sum(record.rows for record in after.values())
    size = sum(record.bytes for record in before.values()), sum(record.bytes for record in after.values())
    return Cleaned(rows[1], rows[0] - rows[1], len(before), len(after), size[0] - size[1])


def _foreseen(records: Mapping[Path, CommitRecord], todo: Sequence[_Rewrite]) -> Cleaned:
    """Return the effect that cleaning would have; sizes of new parts are estimated from those of their sources."""
    left = dict(records)
    for rewrite in todo:
        size = sum(s.record.bytes * s.rows // max(s.record.rows, 1) for s in rewrite.sources)
        if rewrite.target is not None:
            left[rewrite.target] = CommitRecord(sum(s.rows for s in rewrite.sources), size, "", 0)
        for source in rewrite.sources:
            del left[source.path]
    return _difference(records, left)


def _may_gain(store: Path, records: Mapping[Path, CommitRecord], keep: Keep, policy: Policy) -> bool:
    """A cheap look, without reading what was used: whether anything is old, or there are many small files."""
    old = any(_since(part, record) <= keep.from_(None) for part, record in records.items())
    small = sum(record.rows < policy.small_rows for record in records.values())
    return old or small >= policy.joined or len(use_files(store)) > policy.use_files


def _since(part: Path, record: CommitRecord) -> float:
    """When the youngest row of a part was committed."""
    with storage(part, "look at"):
        return part.stat().st_mtime if record.since is None else record.since


def _plan(records: Mapping[Path, CommitRecord], uses: Uses, keep: Keep, policy: Policy) -> list[_Rewrite]:
    """Choose the parts to rewrite. Only neighbours are joined, so that of two completions of a key the first stays
    first."""
    unknown = max(uses.unreadable.values(), default=0.0) > keep.from_(None)
    todo: list[_Rewrite] = []
    group: list[_Source] = []
    for part, record in sorted(records.items()):
        young = unknown or _since(part, record) > keep.from_(None)
        stay = np.ones(record.rows, np.bool_) if young else uses.lately(part.name, record.rows, keep.from_)
        source = _Source(part, record, stay)
        if not source.rows:
            todo.append(_Rewrite((source,)))
            continue
        if group and not _fits(group, source):
            todo += _worth(group, policy)
            group = []
        if source.rows < policy.small_rows or _is_worth(source, policy):
            group.append(source)
        else:
            todo += _worth(group, policy)
            group = []
    return [*todo, *_worth(group, policy)]


def _fits(group: Sequence[_Source], source: _Source) -> bool:
    rows = sum(one.rows for one in group)
    return rows + source.rows <= _PART_ROWS and group[0].record.numerics == source.record.numerics


def _is_worth(source: _Source, policy: Policy) -> bool:
    return source.rows < source.record.rows and source.dropped_share >= policy.dropped_share


def _worth(group: Sequence[_Source], policy: Policy) -> list[_Rewrite]:
    if len(group) < policy.joined and not any(_is_worth(source, policy) for source in group):
        return []
    # takes the first one's place in the order of parts
    sequence = "-".join(group[0].path.stem.split("-")[:3])
    return [_Rewrite(tuple(group), group[0].path.with_name(f"{sequence}-{uuid.uuid4().hex[:8]}.parquet"))]


def _join_uses(
    store: Path,
    uses: Uses,
    records: Mapping[Path, CommitRecord],
    todo: Sequence[_Rewrite],
    keep: Keep,
    ops: FileOps,
) -> None:
    """One file of uses for all, which speaks of the new parts, too."""
    joined = uses.of_parts(part.name for part in records)
    for rewrite in todo:
        if rewrite.target is not None:
            joined = joined.moved(rewrite.target.name, [(s.path.name, s.stay) for s in rewrite.sources])
    write_uses(store, joined, ops)
    over = [path for path, written in uses.unreadable.items() if written <= keep.from_(None)]
    for path in [*uses.files, *over]:
        with storage(path, "remove"):
            ops.unlink(path)


def _rewritten(rewrite: _Rewrite, ops: FileOps) -> dict[Path, CommitRecord]:
    """Carry one out; the new part with its record, if there is one."""
    new: dict[Path, CommitRecord] = {}
    if rewrite.target is not None:
        new[rewrite.target] = _written(rewrite.target, rewrite.sources, ops)
    store = rewrite.sources[0].path.parent
    for ending in (".json", ".parquet"):
        for source in rewrite.sources:
            path = source.path.with_suffix(ending)
            with storage(path, "remove"):
                ops.unlink(path)
        with storage(store, "fsync"):
            ops.fsync_folder(store)
    return new


def _written(target: Path, sources: Sequence[_Source], ops: FileOps) -> CommitRecord:
    with file_digests(target.parent) as digests:  # copied, a damaged part would pass for a whole one
        for source in sources:
            if digests.of(source.path) != source.record.sha256:
                raise damaged(source.path, ValueError("its sha256 is not the recorded one"))
    schema = schema_of(source.path for source in sources)
    are_small = {*schema.names} <= {*COMPLETION_SCHEMA.names, ENGINE_CLASS.name}
    rows = GROUP_ROWS if are_small else _LARGE_GROUP_ROWS
    batches = (padded(batch, schema) for source in sources for batch in _staying(source, rows))
    groups = (batch for table in rebatch(batches, rows) for batch in table.to_batches())
    digest = write_table(target, pa.RecordBatchReader.from_batches(schema, groups), ops)
    record = CommitRecord(
        rows=sum(source.rows for source in sources),
        bytes=digest.bytes,
        sha256=digest.sha256,
        numerics=sources[0].record.numerics,
        replaces=tuple(source.path.name for source in sources),
        since=max(_since(source.path, source.record) for source in sources),
    )
    write_json(target.with_suffix(".json"), record.to_json(), ops)
    return record


def _staying(source: _Source, rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of a part that stay, `rows` at a time. Raises StorageError for a damaged one."""
    row = 0
    try:
        with pq.ParquetFile(source.path, page_checksum_verification=True) as file:
            if file.metadata.num_rows != source.record.rows:
                raise StorageError(
                    f"{source.path}: holds {file.metadata.num_rows} rows, its record says {source.record.rows}"
                )
            for batch in file.iter_batches(batch_size=rows):
                yield batch.filter(pa.array(source.stay[row : row + batch.num_rows]))
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise damaged(source.path, error) from error
