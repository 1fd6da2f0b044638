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
    """Return the dict of strings in a JSON file that `write_strings` wrote.

    It is empty if the file is damaged or missing.
    """
    value = read_json(path)
    return {k: v for k, v in value.items() if isinstance(v, str)} if isinstance(value, dict) else {}


def write_strings(path: Path, values: dict[str, str], ops: FileOps | None = None) -> None:
    """Write a dict of strings, such as digests by file name, to a JSON file durably. Raises StorageError."""
    write_json(path, values, ops or FileOps())


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, or None if the file is missing, unreadable or not valid JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored (%s) and will be written again", path, error)
        return None
