"""Small facts that save a rerun work: digests of weight files, and which inputs a published result came from.

Only ever a shortcut: a file that is missing or damaged costs time, never correctness.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.data.durable import FileOps, write_json
from batchinfer.data.files import InputFile

PARTIAL = "partial.json"  # beside an index: the model and the store that its partial results are made of

_log = logging.getLogger(__name__)


def read_strings(path: Path) -> dict[str, str]:
    """What `write_strings` wrote, e.g. digests by file; empty when there is nothing usable."""
    value = read_json(path)
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


def write_strings(path: Path, values: dict[str, str], ops: FileOps | None = None) -> None:
    """Raises StorageError."""
    write_json(path, values, ops or FileOps())


def published_inputs(path: Path, files: Sequence[InputFile]) -> list[dict[str, Any]] | None:
    """What identified these files when they were published, if size and time of none has changed since."""
    value = read_json(path)
    if not isinstance(value, list):
        return None
    known = {_same(entry.get("file")): entry.get("identity") for entry in value if isinstance(entry, dict)}
    found = [known.get(_same(file.to_json())) for file in files]
    return None if None in found or len(found) != len(value) else [dict(f) for f in found if f is not None]


def remember_inputs(
    path: Path, files: Sequence[InputFile], identities: Sequence[dict[str, Any]], ops: FileOps | None = None
) -> None:
    """Raises StorageError."""
    pairs = zip(files, identities, strict=True)
    write_json(path, [{"file": file.to_json(), "identity": entry} for file, entry in pairs], ops or FileOps())


def _same(value: object) -> str:
    """Equal text for equal values."""
    return json.dumps(value, sort_keys=True)


def read_json(path: Path) -> Any:
    """What stands in a JSON file; None when there is nothing usable."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("%s is ignored (%s) and will be written anew", path, error)
        return None
