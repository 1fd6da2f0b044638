"""`batchinfer verify`: reads everything that was written, and checks page checksums and digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import DamagedResult
from batchinfer.filesystem.location import Location
from batchinfer.store.answers.completion_store import read_records
from batchinfer.store.results.manifest import MANIFEST_NAME, Manifest, read_manifest
from batchinfer.store.results.published import Problem, file_problems


def verify_result(folder: Location) -> list[Problem]:
    """Return the problems of a published result. All files are read, and cached digests are updated.

    Args:
        folder: The result folder.

    Raises:
        OutputConflict: The manifest has a newer format.
        StorageError: The disk fails.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedResult as error:
        return [Problem(folder / MANIFEST_NAME, error.problem)]
    if manifest is None:
        return [Problem(folder, f"no {MANIFEST_NAME}: not a published result")]
    problems = list(file_problems(folder, manifest, fresh=True))
    unreadable = [
        problem
        for file in manifest.files
        if (path := folder / file.name).is_file
        for problem in _check_pages(path.local, file.rows)
    ]
    return [*_unlisted(folder, manifest), *problems, *unreadable]


def verify_store(path: Path) -> list[Problem]:
    """Return the problems of the parts of a completion store. All parts are read.

    It takes no lock and changes nothing.

    Args:
        path: The folder of the store.
    """
    records, discarded = read_records(path, verify=True)
    found = [Problem(Location(str(part.path)), part.reason) for part in discarded]
    return found + [
        problem for part, record in records.items() for problem in _check_pages(part, record.rows)
    ]


def _unlisted(folder: Location, manifest: Manifest) -> Iterator[Problem]:
    listed = {file.name for file in manifest.files}
    for name in sorted(folder.names()):
        if name.endswith(".parquet") and name not in listed:
            yield Problem(
                folder / name, "not part of the result, but read with it by *.parquet: move it away"
            )


def _check_pages(path: Path, rows: int) -> Iterator[Problem]:
    found, place = 0, Location(str(path))
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=1024):
                found += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        yield Problem(place, f"damaged: {error}")
        return
    if found != rows:
        yield Problem(place, f"{found} rows, {rows} were written")
