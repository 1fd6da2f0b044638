"""A pool of in-memory DuckDB databases: opening one takes 10 ms, and a job opens seven."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.filesystem import duck
from batchinfer.filesystem.duck import literal
from batchinfer.report.tables import meter

CHANGED = ("memory_limit", "threads", "temp_directory")  # settings that an open database accepts
ALWAYS = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "python_enable_replacements": False,
}
NAME = "used"


class KeptDatabases:
    """Lends each database to one user at a time."""

    def __init__(self) -> None:
        self._free: list[duckdb.DuckDBPyConnection] = []

    @contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[duckdb.DuckDBPyConnection]:
        """Yield an empty database with these settings. It returns to the pool unless it failed or spilled."""
        kept = self._free.pop() if self._free else duckdb.connect(config={**ALWAYS, **settings})
        changes = [
            f"SET {name} = {literal(settings[name])}" if name in settings else f"RESET {name}"
            for name in CHANGED
        ]
        kept.execute("; ".join([*changes, f"ATTACH ':memory:' AS {NAME}"]))
        with kept.cursor() as cursor:
            cursor.execute(f"USE {NAME}")
            yield cursor
        if (spill := settings["temp_directory"]) and Path(spill).exists():
            kept.close()
            return
        kept.execute(f"DETACH {NAME}")
        self._free.append(kept)


def keep(patch: pytest.MonkeyPatch) -> None:
    """Let the package take its databases from a pool."""
    kept = KeptDatabases()
    patch.setattr(duck, "_connect", kept.opened)
    patch.setattr(meter, "open_database", partial(kept.opened, {"threads": 2, "temp_directory": ""}))
