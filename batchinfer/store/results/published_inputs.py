"""Records the inputs of a published result. If they are unchanged, a rerun has nothing to do.

The record is only an optimisation: if it is missing or damaged, the inputs are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.filesystem.durable import FileOps, write_json
from batchinfer.filesystem.json_files import read_json
from batchinfer.input.input_file import InputFile
from batchinfer.store.index.index import Index


def identities(index: Index) -> list[dict[str, Any]]:
    """Return what identifies each input file of an index: its name, size and sha256.

    If a file was not read to its end, its times and inode replace the sha256.
    """
    return [_identity(file, index.sha256.get(file.path)) for file in index.inputs]


def _identity(file: InputFile, digest: str | None) -> dict[str, Any]:
    state = {"mtime_ns": file.mtime_ns, "ctime_ns": file.ctime_ns, "inode": file.inode}
    return {
        "name": file.name,
        "bytes": file.size,
        **({"sha256": digest} if digest else state),
    }  # without a digest if a limit left the file unread


def read_published_inputs(path: Path, files: Sequence[InputFile]) -> list[dict[str, Any]] | None:
    """Return the recorded identities of input files, or None if the files have changed since.

    Files are compared by size, times and inode.

    Args:
        path: The record, written by `remember_inputs`.
        files: The input files.
    """
    value = read_json(path)
    if not isinstance(value, list):
        return None
    known = {_same(entry.get("file")): entry.get("identity") for entry in value if isinstance(entry, dict)}
    found = [known.get(_same(file.to_json())) for file in files]
    return None if None in found or len(found) != len(value) else [dict(f) for f in found if f is not None]


def remember_inputs(
    path: Path, files: Sequence[InputFile], identities: Sequence[dict[str, Any]], ops: FileOps | None = None
) -> None:
    """Record which input files a published result was made from. Raises StorageError.

    Args:
        path: The file to write.
        files: The input files.
        identities: The identity of each file, from `identities`.
        ops: File operations.
    """
    pairs = zip(files, identities, strict=True)
    write_json(path, [{"file": file.to_json(), "identity": entry} for file, entry in pairs], ops or FileOps())


def _same(value: object) -> str:
    return json.dumps(value, sort_keys=True)
