"""Opens a published result: every file has the digest in the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from batchinfer.core.errors import DamagedResult
from batchinfer.filesystem.digests import FileDigests, file_digests
from batchinfer.filesystem.durable import storage
from batchinfer.filesystem.location import Location
from batchinfer.store.results.manifest import Manifest, ResultFile, damaged_result, read_manifest


@dataclass(frozen=True, slots=True)
class Published:
    """A published result, after a check that all files have the digests in the manifest.

    Attributes:
        manifest: The content of its manifest.
        files: Its Parquet files in input order.
    """

    manifest: Manifest
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of a result or store that is damaged, missing or unexpected.

    Attributes:
        file: The file.
        message: A description of the problem.
    """

    file: Location
    message: str


def open_published(folder: Location, *, fresh: bool = False) -> Published | None:
    """Return the published result in a folder, or None if nothing is published there.

    Args:
        folder: The result folder.
        fresh: True to read all files. Otherwise cached digests of unchanged files are used.

    Raises:
        DamagedResult: A file is not as it was published.
        OutputConflict: The manifest has a newer format.
        StorageError: A file cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    for problem in file_problems(folder, manifest, fresh=fresh):
        raise damaged_result(problem.file, problem.message)
    return Published(manifest, tuple((folder / file.name).local for file in manifest.files))


def open_published_or_notify(
    folder: Location, notice: Callable[[str], None], *, fresh: bool = False
) -> Published | None:
    """Return the published result in a folder, or None if there is none or it is damaged.

    Args:
        folder: The result folder.
        notice: Called with a message if the result is damaged.
        fresh: True to read all files. Otherwise cached digests of unchanged files are used.

    Raises:
        OutputConflict: The manifest has a newer format.
        StorageError: A file cannot be read.
    """
    try:
        return open_published(folder, fresh=fresh)
    except DamagedResult as error:
        notice(f"{error.place}: {error.problem}; the result is published again")
        return None


def open_if_intact(folder: Location) -> Published | None:
    """Return the published result in a folder, or None if there is none or it is damaged.

    Raises OutputConflict, StorageError.
    """
    try:
        return open_published(folder)
    except DamagedResult:
        return None


def count_published_input_rows(folder: Location) -> int | None:
    """Return the number of input rows of the result in a folder. A row with several answers counts once.

    Return None if nothing is published there, or the result is damaged.

    Raises:
        OutputConflict: The manifest has a newer format.
        StorageError: A file cannot be read.
    """
    found = open_if_intact(folder)
    if found is None or not found.manifest.rows:
        return None if found is None else 0
    with storage(found.files[-1], "read"):
        last = pq.read_table(found.files[-1], columns=["row_id"]).column(0)
    return int(last[-1].as_py()) + 1


def file_problems(folder: Location, manifest: Manifest, *, fresh: bool = False) -> Iterator[Problem]:
    """Yield a problem for each file of a result that is missing, or differs from the manifest.

    Args:
        folder: The result folder.
        manifest: The manifest.
        fresh: True to read all files. Otherwise cached digests of unchanged files are used.
    """
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
