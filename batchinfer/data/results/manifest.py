"""The manifest of a published result: whose it is, what it holds, and the digest of every file.

It holds no times, hosts or attempts: equal rows give an equal manifest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from batchinfer.data.storage.durable import storage
from batchinfer.errors import OutputConflict, StorageError

MANIFEST_FORMAT = 1
MANIFEST_NAME = "_manifest.json"  # pyarrow, pandas and Spark skip names that begin so
# what a desktop leaves behind in any folder that is looked at
_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """What a result is the result of. Two equal specs over equal completions publish equal bytes."""

    job: str  # the job's name
    identity: str  # sha256 of everything in the job and the checkpoint that shapes rows
    inputs: tuple[Mapping[str, Any], ...]  # per input file what identifies it, e.g. path, bytes, sha256
    numerics: int
    rows_per_file: int = 100_000


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One Parquet file of a result."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of _manifest.json."""

    job: str
    identity: str
    inputs: tuple[Mapping[str, Any], ...]
    numerics: int
    generation: str  # 16 hex digits, derived from all the rest; stands in every file name
    rows: int
    ok: int
    errors: int
    retryable: int  # of the errors
    endpoints: tuple[str, ...]  # of an OpenAI batch input: the different ones, sorted
    files: tuple[ResultFile, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": MANIFEST_FORMAT, **asdict(self)}


def generation_of(spec: PublishSpec, files: Sequence[ResultFile]) -> str:
    """16 hex digits that are a function of the spec and the contents of the files, not of their names."""
    contents = [[file.rows, file.bytes, file.sha256] for file in files]
    inputs = [dict(item) for item in spec.inputs]
    material = [MANIFEST_FORMAT, spec.job, spec.identity, inputs, spec.numerics, contents]
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:16]


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a result folder, or None without one. Raises OutputConflict for one we cannot read."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    with storage(path, "read"):
        text = path.read_bytes()
    try:
        raw = json.loads(text)
        version = int(raw.pop("format"))
        manifest = _from_json(raw) if version <= MANIFEST_FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputConflict(
            f"{path}: not a manifest of batchinfer ({error}); move the folder away"
        ) from error
    if manifest is None:
        raise OutputConflict(
            f"{path}: manifest format {version}, this version knows up to {MANIFEST_FORMAT}; "
            "use the batchinfer that wrote it, or another output.path"
        )
    return manifest


def _from_json(raw: dict[str, Any]) -> Manifest:
    unknown = sorted(set(raw) - {field.name for field in fields(Manifest)})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    files = tuple(ResultFile(**file) for file in raw.pop("files"))
    inputs, endpoints = tuple(raw.pop("inputs")), tuple(raw.pop("endpoints"))
    return Manifest(**raw, inputs=inputs, endpoints=endpoints, files=files)


def check_destination(folder: Path, job: str, replace: bool = False) -> Manifest | None:
    """Whether a job may publish into `folder`; the manifest of the older result there, if any.

    Raises OutputConflict for a file, a folder with anything in it that we did not write (`replace` or not),
    and for the result of another job unless `replace`.
    """
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise OutputConflict(f"{parent}: is a file; output.path ({folder}) needs a folder there")
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise OutputConflict(f"{folder}: is a file; output.path must name a folder")
    manifest = read_manifest(folder)
    known = {MANIFEST_NAME, *(file.name for file in manifest.files)} if manifest else set()
    strange = sorted(set(_names(folder)) - known - _LITTER)
    if strange:
        raise OutputConflict(
            f"{folder}: holds {strange[0]!r}, which batchinfer did not write; a folder with other files is "
            "never replaced: move them away, or choose another output.path"
        )
    if manifest and manifest.job != job and not replace:
        raise OutputConflict(
            f"{folder}: holds the result of job {manifest.job!r}, not of {job!r}; "
            "choose another output.path, or replace it with --replace"
        )
    return manifest


def is_published(folder: Path, spec: PublishSpec) -> bool:
    """Whether `folder` holds this very result whole, by manifest and file sizes (`verify_result` reads it
    all).
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    cut = [
        min(spec.rows_per_file, manifest.rows - start) for start in _starts(manifest.rows, spec.rows_per_file)
    ]
    ours = (spec.job, spec.identity, tuple(spec.inputs), spec.numerics)
    theirs = (manifest.job, manifest.identity, manifest.inputs, manifest.numerics)
    sizes = [file.rows for file in manifest.files]
    return ours == theirs and sizes == cut and is_whole(folder, manifest)


def _starts(rows: int, rows_per_file: int) -> range:
    """The first row of each file; one file even without rows."""
    return range(0, max(rows, 1), rows_per_file)


def whole_files(folder: Path, manifest: Manifest) -> list[Path]:
    """The files of a result. Raises StorageError where one is missing or cut short."""
    if not is_whole(folder, manifest):
        raise StorageError(
            f"{folder}: files are missing or cut short; `batchinfer verify {folder}` says which"
        )
    return [folder / file.name for file in manifest.files]


def is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether every file is there with the size that the manifest says."""
    return all(_size(folder / file.name) == file.bytes for file in manifest.files)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _names(folder: Path) -> list[str]:
    with storage(folder, "list"):
        return [entry.name for entry in folder.iterdir()]
