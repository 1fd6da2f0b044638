"""Small facts that save a rerun work, e.g. digests of weight files, in files of JSON.

Only ever a shortcut: a file that is missing or damaged costs time, never correctness.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from batchinfer.filesystem.durable import FileOps, write_json

_log = logging.getLogger(__name__)


def read_strings(path: Path) -> dict[str, str]:
    """Read what `write_strings` wrote, e.g. digests by file; empty if there is nothing usable."""
    value = read_json(path)
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


def write_strings(path: Path, values: dict[str, str], ops: FileOps | None = None) -> None:
    """Raises StorageError."""
    write_json(path, values, ops or FileOps())


def read_json(path: Path) -> Any:
    """Read a JSON file; None if there is nothing usable."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored (%s) and will be written again", path, error)
        return None
