"""`batchinfer verify`: read everything that was written, page checksums and digests included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.results.completion_store import read_records
from batchinfer.data.results.manifest import MANIFEST_NAME, Manifest, ResultFile, read_manifest
from batchinfer.data.storage.durable import sha256_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written."""

    path: Path
    message: str


def verify_result(folder: Path) -> list[Problem]:
    """Check a published result against its manifest; empty when all is well.

    Raises OutputConflict for a manifest that cannot be read, StorageError when the disk fails.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [Problem(folder, f"no {MANIFEST_NAME}: not a published result")]
    return [*_unlisted(folder, manifest), *(p for file in manifest.files for p in _check_file(folder, file))]


def verify_store(path: Path) -> list[Problem]:
    """Check every committed part of a completion store, without its lock and without changing it."""
    records, discarded = read_records(path, verify=True)
    found = [Problem(part.path, part.reason) for part in discarded]
    return found + [
        problem for part, record in records.items() for problem in _check_pages(part, record.rows)
    ]


def _unlisted(folder: Path, manifest: Manifest) -> Iterator[Problem]:
    listed = {file.name for file in manifest.files}
    for path in sorted(folder.glob("*.parquet")):
        if path.name not in listed:
            yield Problem(path, "not in the manifest, but a reader of *.parquet takes it in")


def _check_file(folder: Path, file: ResultFile) -> Iterator[Problem]:
    path = folder / file.name
    if not path.is_file():
        yield Problem(path, "missing")
        return
    if (size := path.stat().st_size) != file.bytes:
        yield Problem(path, f"{size} bytes, the manifest says {file.bytes}")
    elif sha256_of(path) != file.sha256:
        yield Problem(path, "its sha256 is not the one in the manifest")
    yield from _check_pages(path, file.rows)


def _check_pages(path: Path, rows: int) -> Iterator[Problem]:
    """Decode every page with its checksum verified and count the rows."""
    found = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=1024):
                found += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        yield Problem(path, f"damaged: {error}")
        return
    if found != rows:
        yield Problem(path, f"{found} rows, {rows} were written")
