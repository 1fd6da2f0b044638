"""A log of the last use of each stored completion by a result, which determines how long it is kept.

    completions/uses/<random>.parquet

A row has the last use of each completion of one part by one result. Every publish adds a file; cleaning merges all
files into one. The commit of a completion counts as its first use.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.filesystem.durable import TEMPORARY, FileOps, storage
from batchinfer.filesystem.part_writer import open_part
from batchinfer.job import CacheSection

_FOLDER = "uses"
_PARTS_AT_ONCE = 256
# Matches the whole name, so other files are not removed
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.parquet\.tmp")
_SCHEMA = pa.schema(
    [
        ("part", pa.string()),  # file name
        ("job", pa.string()),  # results root of the job
        (
            "marker",
            pa.string(),
        ),  # file whose modification time is the last time the result was found published and unchanged
        ("keep", pa.int64()),  # days that this job keeps unused completions; null: forever
        ("used_at", pa.list_(pa.uint32())),  # Unix time by row number; 0: never
    ],
    metadata={"batchinfer.table": "uses", "batchinfer.format": "1"},
)
Times = NDArray[np.uint32]
Mask = NDArray[np.bool_]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UsingResult:
    """A published result that uses stored completions.

    Attributes:
        job: Folder of the job's results.
        marker: A file whose modification time is the last time the result was found published and unchanged.
        keep: Days that the job keeps unused completions. None: forever.
    """

    job: str
    marker: str
    keep: int | None

    @property
    def result(self) -> tuple[str, str]:
        """Return the job folder and the marker, which together identify the result."""
        return self.job, self.marker


@dataclass(frozen=True, slots=True)
class Uses:
    """The recorded uses of a store's completions by results. They determine how long a completion is kept.

    Attributes:
        times: The Unix time of the last use of each row of a part, by part name and result. 0: never used.
        files: The files that the uses were read from.
        unreadable: Files that cannot be read, with their modification time as Unix time.
    """

    times: Mapping[str, Mapping[UsingResult, Times]]
    files: tuple[Path, ...] = ()
    unreadable: Mapping[Path, float] = field(default_factory=dict)

    def used_since(self, part: str, rows: int, oldest: Callable[[UsingResult], float]) -> Mask:
        """Return a mask of the rows of a part that at least one result has used recently.

        Args:
            part: The name of the part of the store.
            rows: The number of rows of the part.
            oldest: Returns, for a result, the Unix time after which its uses count.
        """
        found = np.zeros(rows, np.bool_)
        for user, times in self.times.get(part, {}).items():
            found |= times > oldest(user)
        return found

    def with_part(self, target: str, sources: Sequence[tuple[str, Mask]]) -> Uses:
        """Return the uses with a new part added, whose rows were copied from other parts.

        A copied row keeps its uses.

        Args:
            target: The name of the new part.
            sources: Names of the old parts in the order of the copied rows, each with a mask of the copied
                rows.
        """
        users = {user for name, _ in sources for user in self.times.get(name, {})}
        new = {
            user: np.concatenate(
                [
                    self.times.get(name, {}).get(user, np.zeros(len(rows), np.uint32))[rows]
                    for name, rows in sources
                ]
            )
            for user in users
        }
        return replace(self, times={**self.times, target: new})

    def of_parts(self, names: Iterable[str]) -> Uses:
        """Return only the uses of rows in the parts with these names."""
        there = set(names)
        return replace(self, times={part: users for part, users in self.times.items() if part in there})

    def renew(self) -> Uses:
        """Return the uses, updated by results that were later found published and unchanged.

        A run that finds its result unchanged only touches the result's marker file. The rows that the result
        used when it was published then count as used at the modification time of the marker.
        """
        newest: dict[tuple[str, str], int] = {}
        for users in self.times.values():
            for user, times in users.items():
                newest[user.result] = max(newest.get(user.result, 0), int(times.max(initial=0)))
        again = {result: max(_time_of(result[1]), time) for result, time in newest.items()}
        return replace(
            self,
            times={
                part: {
                    user: np.where(times == newest[user.result], again[user.result], times).astype(np.uint32)
                    for user, times in users.items()
                }
                for part, users in self.times.items()
            },
        )


def _time_of(marker: str) -> int:
    path = Path(marker)
    return int(path.stat().st_mtime) if marker and path.is_file() else 0


def record_use(
    user: UsingResult, used: Iterable[tuple[str, NDArray[np.int64]]], rows: Mapping[str, int], now: float
) -> Uses:
    """Return the uses that a result adds by using rows of the store at the time `now`.

    Args:
        user: The result.
        used: Names of parts of the store, each with the numbers of the used rows.
        rows: The number of rows of each part, by part name.
        now: Unix time.
    """
    times: dict[str, Mapping[UsingResult, Times]] = {}
    for part, numbers in used:
        mine = times.setdefault(part, {user: np.zeros(rows[part], np.uint32)})
        mine[user][numbers] = int(now)
    return Uses(times)


def write_uses(store: Path, uses: Uses, ops: FileOps) -> None:
    """Write recorded uses of completions to a new file in the folder `uses` of a store. Raises StorageError.

    Without any uses, no file is written.
    """
    if not uses.times:
        return
    folder = store / _FOLDER
    with storage(folder, "create"):
        ops.mkdir(folder, 0o700)
    file, writer = open_part(folder / f"{uuid.uuid4().hex}.parquet", _SCHEMA, ops)
    try:
        for batch in _batches(uses):
            writer.write_batch(batch)
        writer.close()
        file.commit()
    finally:
        file.close()


def _batches(uses: Uses) -> Iterator[pa.RecordBatch]:
    entries = [(part, user, times) for part, users in uses.times.items() for user, times in users.items()]
    for start in range(0, len(entries), _PARTS_AT_ONCE):
        parts, users, times = zip(*entries[start : start + _PARTS_AT_ONCE], strict=True)
        ends = np.cumsum([0, *(len(one) for one in times)]).astype(np.int32)
        columns = [
            pa.array(parts, pa.string()),
            pa.array([user.job for user in users], pa.string()),
            pa.array([user.marker for user in users], pa.string()),
            pa.array([user.keep for user in users], pa.int64()),
            pa.ListArray.from_arrays(pa.array(ends), pa.array(np.concatenate(times))),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def temporary_use_files(store: Path) -> list[Path]:
    """Return the temporary files that a crash left in the folder `uses` of a store."""
    with storage(store / _FOLDER, "list"):
        return sorted(
            path for path in (store / _FOLDER).glob(f"*{TEMPORARY}") if _TEMPORARY.fullmatch(path.name)
        )


def use_files(store: Path) -> list[Path]:
    """Return the files in the folder of a store that record uses of completions, sorted by name."""
    with storage(store / _FOLDER, "list"):
        return sorted((store / _FOLDER).glob("*.parquet"))


def read_uses(store: Path) -> Uses:
    """Return all recorded uses of a store's completions. Raises StorageError if the disk fails.

    A damaged file is logged and listed as unreadable. Results of a job whose marker files were removed are
    combined into one with the marker "".
    """
    times: dict[str, dict[UsingResult, Times]] = {}
    files, unreadable = [], {}
    for path in use_files(store):
        try:
            found = list(_entries(path))
        except (pa.ArrowException, OSError, ValueError) as error:
            _log.warning(
                "%s cannot be read (%s): the age of stored answers is counted from when they were written",
                path,
                error,
            )
            unreadable[path] = path.stat().st_mtime
            continue
        files.append(path)
        for part, user, used_at in found:
            mine = times.setdefault(part, {})
            user = user if _time_of(user.marker) else replace(user, marker="")
            mine[user] = np.maximum(mine[user], used_at) if user in mine else used_at
    return Uses(times, tuple(files), unreadable)


def stored_keep(store: Path, job: str) -> int | None:
    """Return how many days a job keeps unused completions, as recorded by its latest result. None: forever.

    If no result of the job was recorded, return the default of `cache.keep`.

    Args:
        store: The folder of the store.
        job: Folder of the job's results.
    """
    newest: dict[int | None, int] = {}
    for users in read_uses(store).times.values():
        for user, times in users.items():
            if user.job == job:
                newest[user.keep] = max(newest.get(user.keep, 0), int(times.max(initial=0)))
    return max(newest, key=lambda keep: newest[keep]) if newest else CacheSection().keep


def _entries(path: Path) -> Iterator[tuple[str, UsingResult, Times]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if not file.schema_arrow.equals(_SCHEMA):
            raise ValueError("its columns differ from the columns of this version")
        for batch in file.iter_batches(batch_size=_PARTS_AT_ONCE):
            names = batch.select(["part", "job", "marker", "keep"]).to_pylist()
            for name, times in zip(names, batch.column("used_at"), strict=True):
                user = UsingResult(name["job"], name["marker"], name["keep"])
                yield name["part"], user, times.values.to_numpy()
