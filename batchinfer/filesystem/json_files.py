"""Reads and writes small JSON files with facts that save time in a rerun, such as digests of weight files.

They are only an optimisation: if a file is missing or damaged, the facts are computed again.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from batchinfer.filesystem.durable import FileOps, write_json

_log = logging.getLogger(__name__)


def read_strings(path: Path) -> dict[str, str]:
    """Return the strings by name that `write_strings` wrote, or an empty dict if the file is unusable."""
    value = read_json(path)
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


def write_strings(path: Path, values: dict[str, str], ops: FileOps | None = None) -> None:
    """Write strings by name, such as digests by file, to a JSON file. Raises StorageError."""
    write_json(path, values, ops or FileOps())


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, or None if it is missing or unusable."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored (%s) and will be written again", path, error)
        return None
