"""A published result as its readers open it: every file has the digest that the manifest says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from batchinfer.core.errors import DamagedResult
from batchinfer.filesystem.digests import FileDigests, file_digests
from batchinfer.filesystem.durable import storage
from batchinfer.filesystem.location import Location
from batchinfer.store.results.manifest import Manifest, ResultFile, damaged, read_manifest


@dataclass(frozen=True, slots=True)
class Published:
    """A result that is as it was published. `files` are in the order of the input."""

    manifest: Manifest
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written."""

    file: Location
    message: str


def published(folder: Location, *, fresh: bool = False) -> Published | None:
    """The result in a folder, None where nothing is published. A digest is computed once for each state of its file;
    `fresh`: all of them now.

    Raises DamagedResult for what is not as it was published, OutputConflict for a newer format, StorageError.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for problem in file_problems(folder, manifest, fresh=fresh):
        raise damaged(problem.file, problem.message)
    return Published(manifest, tuple((folder / file.name).local for file in manifest.files))


def published_or_told(
    folder: Location, notice: Callable[[str], None], *, fresh: bool = False
) -> Published | None:
    """The result in a folder; of a damaged one, which its job publishes again, `notice` hears."""
    try:
        return published(folder, fresh=fresh)
    except DamagedResult as error:
        notice(f"{error.place}: {error.problem}; the result is published again")
        return None


def intact(folder: Location) -> Published | None:
    """The result in a folder; None also where it is damaged. Raises OutputConflict, StorageError."""
    try:
        return published(folder)
    except DamagedResult:
        return None


def published_input_rows(folder: Location) -> int | None:
    """Return the number of input rows of the result in a folder. A row with several answers counts once.

    None: nothing is published there, or the result is damaged. Raises OutputConflict, StorageError.
    """
    found = intact(folder)
    if found is None or not found.manifest.rows:
        return None if found is None else 0
    with storage(found.files[-1], "read"):
        last = pq.read_table(found.files[-1], columns=["row_id"]).column(0)
    return int(last[-1].as_py()) + 1


def file_problems(folder: Location, manifest: Manifest, *, fresh: bool = False) -> Iterator[Problem]:
    """The files of a result that are not as the manifest says, each with what is wrong."""
    with file_digests(folder.local, fresh=fresh) as digests:
        for file in manifest.files:
            problem = _file_problem((folder / file.name).local, file, digests)
            if problem is not None:
                yield Problem(folder / file.name, problem)


def _file_problem(path: Path, file: ResultFile, digests: FileDigests) -> str | None:
    if not path.is_file():
        return "missing"
    if (size := path.stat().st_size) != file.bytes:
        return f"{size} bytes, the manifest says {file.bytes}"
    return None if digests.of(path) == file.sha256 else "its sha256 is not the one in the manifest"
