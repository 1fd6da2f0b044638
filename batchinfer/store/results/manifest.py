"""The manifest of a published result: its job, its contents and the digest of every file.

It has no times, hosts or attempts, so equal rows give an equal manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from batchinfer.core.errors import DamagedResult, OutputConflict
from batchinfer.filesystem.durable import json_text, storage
from batchinfer.filesystem.location import Location

MANIFEST_FORMAT = 1
MANIFEST_NAME = "_manifest.json"  # pyarrow, pandas and Spark skip names that begin with an underscore
# Files that desktops create in any folder they show
_LITTER = frozenset({".DS_Store", "Thumbs.db", "desktop.ini"})
_DATA_NAME = re.compile(r"part-([0-9a-f]{16})-\d{5,}\.parquet")


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """Everything that determines the bytes of a result, except its answers.

    Attributes:
        job: The job's name.
        identity: The sha256 of everything in the job and the checkpoint that determines rows.
        inputs: The identity of each input file, such as name, bytes and sha256.
        numerics: Version of the numerics.
        rows_per_file: Rows per result file. The last file may have fewer.
    """

    job: str
    identity: str
    inputs: tuple[Mapping[str, Any], ...]
    numerics: int
    rows_per_file: int = 100_000


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One Parquet file of a result: its name, number of rows, size and digest."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of _manifest.json in a result folder, which describes the result and its files.

    Attributes:
        job: The job's name.
        identity: The sha256 of everything in the job and the checkpoint that determines rows.
        inputs: The identity of each input file, such as name, bytes and sha256.
        numerics: Version of the numerics.
        generation: 16 hex digits that are derived from the contents of the result; part of every file name.
        rows: Number of rows.
        ok: Number of rows without an error.
        errors: Number of error rows.
        retryable: Number of error rows that a retry may fix.
        endpoints: The distinct endpoints of an OpenAI batch input, sorted.
        files: The Parquet files of the result, in row order.
    """

    job: str
    identity: str
    inputs: tuple[Mapping[str, Any], ...]
    numerics: int
    generation: str
    rows: int
    ok: int
    errors: int
    retryable: int
    endpoints: tuple[str, ...]
    files: tuple[ResultFile, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the manifest of a result as a JSON object."""
        return {"format": MANIFEST_FORMAT, **asdict(self)}


def generation_of(spec: PublishSpec, files: Sequence[ResultFile]) -> str:
    """Return the generation of a result: 16 hex digits that are equal for equal results.

    They are derived from the spec and the contents of the files, but not from file names.
    """
    contents = [[file.rows, file.bytes, file.sha256] for file in files]
    inputs = [dict(item) for item in spec.inputs]
    material = [MANIFEST_FORMAT, spec.job, spec.identity, inputs, spec.numerics, contents]
    return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()[:16]


def file_name(generation: str, number: int) -> str:
    """Return the name of a result file. Every name has the generation, so it never refers to other contents.

    Args:
        generation: The generation of the result.
        number: The number of the file, from 0.
    """
    return f"part-{generation}-{number:05d}.parquet"


def read_manifest(folder: Location) -> Manifest | None:
    """Return the manifest of a result folder, or None if nothing is published there.

    Raises:
        DamagedResult: The manifest has changed, or it is missing and result files exist.
        OutputConflict: The manifest has a newer format.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file:
        if _generations(folder):
            raise damaged_result(path, "it is missing, and files of a result are there")
        return None
    with storage(path.local, "read"), path.open() as file:
        text = file.read()
    try:
        raw = json.loads(text)
        version = int(raw.pop("format"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged_result(path, f"it is not a manifest of batchinfer ({error})") from error
    try:
        manifest = _from_json(raw)
        problem = _problem(manifest)
        whole = problem is None and text == json_text(manifest.to_json() | {"format": version})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        manifest, problem, whole = None, str(error), False
    if version > MANIFEST_FORMAT and not whole:  # otherwise only the format number was changed
        raise OutputConflict(
            f"{path}: manifest format {version}, this version knows up to {MANIFEST_FORMAT}; "
            "use the batchinfer that wrote it, or another output.path"
        )
    if manifest is None or not whole or version != MANIFEST_FORMAT:
        why = (
            "it has changed since it was written"
            if problem is None
            else f"it is not a manifest of batchinfer ({problem})"
        )
        job = raw.get("job")
        raise damaged_result(path, why, job if isinstance(job, str) else None)
    return manifest


def _from_json(raw: dict[str, Any]) -> Manifest:
    unknown = sorted(set(raw) - {field.name for field in fields(Manifest)})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}")
    files = tuple(ResultFile(**file) for file in raw["files"])
    inputs, endpoints = tuple(raw["inputs"]), tuple(raw["endpoints"])
    return Manifest(**raw | {"inputs": inputs, "endpoints": endpoints, "files": files})


def _problem(manifest: Manifest) -> str | None:
    spec = PublishSpec(manifest.job, manifest.identity, manifest.inputs, manifest.numerics)
    if manifest.generation != generation_of(spec, manifest.files):
        return "its generation does not match its contents"
    names = [file_name(manifest.generation, number) for number in range(len(manifest.files))]
    if names != [file.name for file in manifest.files]:
        return "the names of its files do not match its generation"
    counts = (manifest.rows, manifest.ok, manifest.errors, manifest.retryable)
    if any(type(count) is not int or count < 0 for count in counts):
        return "its counts are not all counts"
    rows = sum(file.rows for file in manifest.files)
    right = manifest.rows == rows == manifest.ok + manifest.errors and manifest.retryable <= manifest.errors
    return None if right else "its counts contradict each other"


def damaged_result(path: Location, problem: str, job: str | None = None) -> DamagedResult:
    """Return the error for a damaged file of a result, with the next step.

    Args:
        path: The file.
        problem: The kind of damage, for users.
        job: The name of the job that published the result, if it is known.
    """
    return DamagedResult(
        f"{path}: {problem}; run its job again, which publishes the result again from the stored answers; "
        f"`batchinfer verify {path.local.parent} --repair` does that",
        str(path),
        problem,
        job,
    )


@dataclass(frozen=True, slots=True)
class OlderResult:
    """The result that is published in a folder now, and that a new result will replace.

    Attributes:
        generation: Its generation, or "damaged" if it is unknown.
    """

    generation: str


def check_destination(
    folder: Location, job: str, replace: bool = False, *, ours: bool = False
) -> OlderResult | None:
    """Check that a job may publish into a folder, and return the result that it would replace, if any.

    The check is made before the run, so that publishing does not fail at its end.

    Args:
        folder: The result folder.
        job: The name of the job.
        replace: True if the result of another job may be replaced.
        ours: True if this job has published there before. Result files without a valid manifest may then be
            replaced.

    Raises:
        OutputConflict: The path is a file, a link or a mount point, the folder has files that batchinfer did
            not write, or it has the result of another job and `replace` is False.
    """
    local = folder.local
    for parent in local.parents:
        if parent.exists() and not parent.is_dir():
            raise OutputConflict(f"{parent}: is a file; output.path ({folder}) needs a folder there")
    if local.is_symlink():
        raise OutputConflict(
            f"{folder}: is a symbolic link, and a result is put in its place by renaming folders; name the folder "
            f"itself: output.path: {os.path.realpath(local)}"
        )
    if os.path.ismount(local):
        raise OutputConflict(
            f"{folder}: is where a disk is mounted, and a result is put in its place by renaming folders; name a "
            f"folder on that disk: output.path: {folder / 'results'}"
        )
    if not folder.exists:
        return None
    if not folder.is_folder:
        raise OutputConflict(f"{folder}: is a file; output.path must name a folder")
    try:
        manifest = read_manifest(folder)
    except DamagedResult as error:
        return _damaged_older(folder, job, replace, ours, error)
    if manifest is None:
        _refuse_strangers(folder, set())
        return None
    lost = any(_size(folder / file.name) != file.bytes for file in manifest.files)
    others = _data_names(folder) if lost and ours else ()  # a newer result may have an older manifest
    _refuse_strangers(folder, {MANIFEST_NAME, *(file.name for file in manifest.files), *others})
    if manifest.job != job and not replace:
        raise _of_another(folder, manifest.job, job)
    return OlderResult(manifest.generation)


def _of_another(folder: Location, theirs: str, job: str) -> OutputConflict:
    return OutputConflict(
        f"{folder}: holds the result of job {theirs!r}, not of {job!r}; "
        "choose another output.path, or replace it with --replace"
    )


def _damaged_older(
    folder: Location, job: str, replace: bool, ours: bool, error: DamagedResult
) -> OlderResult:
    # A result with a damaged manifest may be replaced if this job published it, or if the manifest names
    # another job and `replace` is True
    generations = _generations(folder)
    _refuse_strangers(folder, {MANIFEST_NAME, *_data_names(folder)})
    others = error.job is not None and error.job != job and not ours
    if others and not replace:
        raise _of_another(folder, str(error.job), job)
    if not (ours or others) or len(generations) > 1:
        raise OutputConflict(
            f"{error.place}: {error.problem}; nothing else says that this job published it, so it is not "
            "replaced: move the folder away, or choose another output.path"
        )
    return OlderResult(next(iter(generations), "damaged"))


def _refuse_strangers(folder: Location, known: set[str]) -> None:
    strange = sorted(set(_names(folder)) - known - _LITTER)
    if strange:
        raise OutputConflict(
            f"{folder}: holds {strange[0]!r}, which batchinfer did not write; a folder with other files is "
            "never replaced: move them away, or choose another output.path"
        )


def is_published(folder: Location, spec: PublishSpec) -> bool:
    """Return True if a folder has the result that `spec` describes, with files of the right size.

    Digests are not checked; `open_published` checks them.

    Args:
        folder: The result folder.
        spec: The identity of the result.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedResult:
        return False
    if manifest is None:
        return False
    expected_rows = [
        min(spec.rows_per_file, manifest.rows - start) for start in _starts(manifest.rows, spec.rows_per_file)
    ]
    ours = (spec.job, spec.identity, tuple(spec.inputs), spec.numerics)
    theirs = (manifest.job, manifest.identity, manifest.inputs, manifest.numerics)
    if ours != theirs or expected_rows != [file.rows for file in manifest.files]:
        return False
    return all(_size(folder / file.name) == file.bytes for file in manifest.files)


def _starts(rows: int, rows_per_file: int) -> range:
    # There is at least one file, even without rows
    return range(0, max(rows, 1), rows_per_file)


def _size(file: Location) -> int:
    facts = file.facts() if file.exists else None
    return -1 if facts is None else facts.size


def _generations(folder: Location) -> set[str]:
    return {name.split("-")[1] for name in _data_names(folder)}


def _data_names(folder: Location) -> list[str]:
    return [name for name in _names(folder) if _DATA_NAME.fullmatch(name)] if folder.is_folder else []


def _names(folder: Location) -> list[str]:
    with storage(folder.local, "list"):
        return folder.names()
