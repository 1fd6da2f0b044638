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
    """Return the identity of each input: its content without times.

    Rewriting a file with equal rows does not change its identity.
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
    """Return the identities of these files when last published, or None if size, times or inode of a file changed."""
    value = read_json(path)
    if not isinstance(value, list):
        return None
    known = {_same(entry.get("file")): entry.get("identity") for entry in value if isinstance(entry, dict)}
    found = [known.get(_same(file.to_json())) for file in files]
    return None if None in found or len(found) != len(value) else [dict(f) for f in found if f is not None]


def remember_inputs(
    path: Path, files: Sequence[InputFile], identities: Sequence[dict[str, Any]], ops: FileOps | None = None
) -> None:
    """Record the identities of these files. Raises StorageError."""
    pairs = zip(files, identities, strict=True)
    write_json(path, [{"file": file.to_json(), "identity": entry} for file, entry in pairs], ops or FileOps())


def _same(value: object) -> str:
    """Return equal text for equal values."""
    return json.dumps(value, sort_keys=True)
