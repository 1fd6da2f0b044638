"""Cleans a completion store: removes completions that no result used recently, and merges small parts.

The process must hold the store exclusively. The kept rows of parts are copied into a new part in durable steps:

    1. the uses of the old rows are recorded for the new part, too          (ignored while the part does not exist)
    2. the new part is written                                              (it does not exist without a record)
    3. its record is written, which names the parts that it replaces        (they no longer exist from here on)
    4. the records of the old parts are removed, then the old parts

After a crash at any point, every kept completion exists once. The record of a part without kept rows is removed first.
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
from batchinfer.store.answers.parts import (
    COMPLETION_SCHEMA,
    ENGINE_CLASS,
    damaged_part,
    pad_columns,
    schema_of,
)
from batchinfer.store.answers.store_lock import StoreLock
from batchinfer.store.answers.uses import Mask, Uses, UsingResult, read_uses, use_files, write_uses

_PART_ROWS = 50_000  # maximum rows of a new part
_LARGE_GROUP_ROWS = 256  # rows per row group if rows have outputs such as vectors, up to a megabyte each
_DAY_S = 86400


@dataclass(frozen=True, slots=True)
class Policy:
    """Thresholds that decide which parts of a store are rewritten.

    Attributes:
        dropped_share: Minimum share of removed rows, from 0 to 1, for rewriting a part.
        small_rows: A part with fewer rows is small, and may be merged with adjacent small parts.
        merged: Minimum number of consecutive small parts to merge.
        use_files: Maximum number of files with recorded uses of completions. If there are more, they are
            merged.
    """

    dropped_share: float
    small_rows: int
    merged: int
    use_files: int


# After each run: a store has at most a third more rows than needed, and a completion is copied only a few times.
# Parts of 1,000 rows, as commit.rows writes them, are not merged: for a million rows this took 25 s (two busy cores),
# and saved 0.4 s at every start.
CHEAP = Policy(dropped_share=0.25, small_rows=1000, merged=32, use_files=16)
THOROUGH = Policy(dropped_share=0.0, small_rows=10_000, merged=2, use_files=1)


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """The rule for how long the store keeps completions that results no longer use.

    Attributes:
        days: Days to keep a completion after its last use by `job`, and after its commit. None: forever.
        job: The result folder of the job that sets `days`. Uses by other jobs count for the number of days
            that those jobs recorded.
        now: The current Unix time.
    """

    days: int | None
    job: str | None = None
    now: float = field(default_factory=time.time)

    def cutoff(self, user: UsingResult | None) -> float:
        """Return a Unix time: the store keeps the completions that were used after this time.

        It is 0 if completions are kept forever.

        Args:
            user: The result that used the completions. None: the store keeps the completions that were
                committed after the returned time.
        """
        days = self.days if user is None or user.job == self.job else user.keep
        return 0.0 if days is None else max(self.now - days * _DAY_S, 0.0)


@dataclass(frozen=True, slots=True)
class CleaningResult:
    """The effect of cleaning a completion store, or the estimate of a dry run.

    Attributes:
        rows_kept: Number of completions in the store afterwards.
        rows_dropped: Number of removed completions.
        parts_before: Number of parts before cleaning.
        parts_after: Number of parts afterwards.
        bytes_freed: Difference of the total size of all parts.
    """

    rows_kept: int
    rows_dropped: int
    parts_before: int
    parts_after: int
    bytes_freed: int


@dataclass(frozen=True)
class _Source:
    path: Path
    record: CommitRecord
    kept: Mask

    @cached_property
    def rows(self) -> int:
        return int(self.kept.sum())

    @property
    def dropped_share(self) -> float:
        return 1 - self.rows / self.record.rows


@dataclass(frozen=True, slots=True)
class _Rewrite:
    sources: tuple[_Source, ...]
    target: Path | None = None


def clean_store(
    store: Path,
    keep: RetentionRule,
    policy: Policy = THOROUGH,
    *,
    dry_run: bool = False,
    should_continue: Callable[[], bool] = lambda: True,
    ops: FileOps | None = None,
) -> CleaningResult:
    """Remove completions from the store that `keep` does not protect, and merge small parts.

    Args:
        store: The folder of the store.
        keep: How long unused completions are kept.
        policy: Thresholds for rewriting parts.
        dry_run: Change nothing, and estimate the effect. Needs no lock.
        should_continue: Called before each part is rewritten. Cleaning stops early if it returns False.
        ops: File operations; tests replace them.

    Raises:
        Locked: Another process uses the store.
        StorageError: A file cannot be read or written.
    """
    if not store.is_dir():
        return CleaningResult(0, 0, 0, 0, 0)
    if dry_run:
        records, _ = read_records(store)
        return _estimate(records, _plan(records, read_uses(store).renew(), keep, policy))
    lock = StoreLock(store, ops or FileOps())
    try:
        if not lock.try_exclusive():
            raise Locked(f"{store}: a run is using the stored answers; try again when it is done")
        return _clean(store, keep, policy, should_continue, ops or FileOps())
    finally:
        lock.close()


def _clean(
    store: Path, keep: RetentionRule, policy: Policy, should_continue: Callable[[], bool], ops: FileOps
) -> CleaningResult:
    records, _ = read_records(store)
    sweep(store, records, ops)
    left = dict(records)
    if _may_gain(store, records, keep, policy):
        uses = read_uses(store).renew()
        todo = _plan(records, uses, keep, policy)
        if todo or len(use_files(store)) > policy.use_files:
            _merge_uses(store, uses, records, todo, keep, ops)
        for rewrite in todo:
            if not should_continue():
                break
            left |= _execute(rewrite, ops)
            for source in rewrite.sources:
                del left[source.path]
    return _difference(records, left)


def _difference(before: Mapping[Path, CommitRecord], after: Mapping[Path, CommitRecord]) -> CleaningResult:
    rows = sum(record.rows for record in before.values()), sum(record.rows for record in after.values())
    size = sum(record.bytes for record in before.values()), sum(record.bytes for record in after.values())
    return CleaningResult(rows[1], rows[0] - rows[1], len(before), len(after), size[0] - size[1])


def _estimate(records: Mapping[Path, CommitRecord], todo: Sequence[_Rewrite]) -> CleaningResult:
    # The sizes of new parts are estimated from the parts that they replace
    left = dict(records)
    for rewrite in todo:
        size = sum(s.record.bytes * s.rows // max(s.record.rows, 1) for s in rewrite.sources)
        if rewrite.target is not None:
            left[rewrite.target] = CommitRecord(sum(s.rows for s in rewrite.sources), size, "", 0)
        for source in rewrite.sources:
            del left[source.path]
    return _difference(records, left)


def _may_gain(store: Path, records: Mapping[Path, CommitRecord], keep: RetentionRule, policy: Policy) -> bool:
    # Reads no uses, so it is cheap
    old = any(_since(part, record) <= keep.cutoff(None) for part, record in records.items())
    small = sum(record.rows < policy.small_rows for record in records.values())
    return old or small >= policy.merged or len(use_files(store)) > policy.use_files


def _since(part: Path, record: CommitRecord) -> float:
    with storage(part, "look at"):
        return part.stat().st_mtime if record.since is None else record.since


def _plan(
    records: Mapping[Path, CommitRecord], uses: Uses, keep: RetentionRule, policy: Policy
) -> list[_Rewrite]:
    # Only adjacent parts are merged, so the order of completions with the same key does not change
    unknown = max(uses.unreadable.values(), default=0.0) > keep.cutoff(None)
    todo: list[_Rewrite] = []
    group: list[_Source] = []
    for part, record in sorted(records.items()):
        young = unknown or _since(part, record) > keep.cutoff(None)
        kept = (
            np.ones(record.rows, np.bool_) if young else uses.used_since(part.name, record.rows, keep.cutoff)
        )
        source = _Source(part, record, kept)
        if not source.rows:
            todo.append(_Rewrite((source,)))
            continue
        if group and not _fits(group, source):
            todo += _group_rewrites(group, policy)
            group = []
        if source.rows < policy.small_rows or _should_rewrite(source, policy):
            group.append(source)
        else:
            todo += _group_rewrites(group, policy)
            group = []
    return [*todo, *_group_rewrites(group, policy)]


def _fits(group: Sequence[_Source], source: _Source) -> bool:
    rows = sum(one.rows for one in group)
    return rows + source.rows <= _PART_ROWS and group[0].record.numerics == source.record.numerics


def _should_rewrite(source: _Source, policy: Policy) -> bool:
    return source.rows < source.record.rows and source.dropped_share >= policy.dropped_share


def _group_rewrites(group: Sequence[_Source], policy: Policy) -> list[_Rewrite]:
    if len(group) < policy.merged and not any(_should_rewrite(source, policy) for source in group):
        return []
    # The new part gets the number of the first one, and so its position in the order of parts
    sequence = "-".join(group[0].path.stem.split("-")[:3])
    return [_Rewrite(tuple(group), group[0].path.with_name(f"{sequence}-{uuid.uuid4().hex[:8]}.parquet"))]


def _merge_uses(
    store: Path,
    uses: Uses,
    records: Mapping[Path, CommitRecord],
    todo: Sequence[_Rewrite],
    keep: RetentionRule,
    ops: FileOps,
) -> None:
    # Uses of other parts are dropped. Unreadable files are removed once they are older than the limit for
    # commits
    merged = uses.of_parts(part.name for part in records)
    for rewrite in todo:
        if rewrite.target is not None:
            merged = merged.with_part(rewrite.target.name, [(s.path.name, s.kept) for s in rewrite.sources])
    write_uses(store, merged, ops)
    over = [path for path, written in uses.unreadable.items() if written <= keep.cutoff(None)]
    for path in [*uses.files, *over]:
        with storage(path, "remove"):
            ops.unlink(path)


def _execute(rewrite: _Rewrite, ops: FileOps) -> dict[Path, CommitRecord]:
    new: dict[Path, CommitRecord] = {}
    if rewrite.target is not None:
        new[rewrite.target] = _write_part(rewrite.target, rewrite.sources, ops)
    store = rewrite.sources[0].path.parent
    for ending in (".json", ".parquet"):
        for source in rewrite.sources:
            path = source.path.with_suffix(ending)
            with storage(path, "remove"):
                ops.unlink(path)
        with storage(store, "fsync"):
            ops.fsync_folder(store)
    return new


def _write_part(target: Path, sources: Sequence[_Source], ops: FileOps) -> CommitRecord:
    # Copying would hide damage, since the copy gets a valid digest
    with file_digests(target.parent) as digests:
        for source in sources:
            if digests.of(source.path) != source.record.sha256:
                raise damaged_part(source.path, ValueError("its sha256 is not the recorded one"))
    schema = schema_of(source.path for source in sources)
    are_small = {*schema.names} <= {*COMPLETION_SCHEMA.names, ENGINE_CLASS.name}
    rows = GROUP_ROWS if are_small else _LARGE_GROUP_ROWS
    batches = (pad_columns(batch, schema) for source in sources for batch in _kept_rows(source, rows))
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


def _kept_rows(source: _Source, rows: int) -> Iterator[pa.RecordBatch]:
    row = 0
    try:
        with pq.ParquetFile(source.path, page_checksum_verification=True) as file:
            if file.metadata.num_rows != source.record.rows:
                raise StorageError(
                    f"{source.path}: holds {file.metadata.num_rows} rows, its record says {source.record.rows}"
                )
            for batch in file.iter_batches(batch_size=rows):
                yield batch.filter(pa.array(source.kept[row : row + batch.num_rows]))
                row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise damaged_part(source.path, error) from error
