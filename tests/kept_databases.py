"""DuckDB databases in memory that tests use again: to make one takes longer than most of what they do with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from batchinfer.filesystem.duck import literal

CHANGED = ("memory_limit", "threads", "temp_directory")  # settings that a database which runs can take
NAME = "used"


class KeptDatabases:
    """Opens databases for `batchinfer.filesystem.duck`, each of which one user has at a time."""

    def __init__(self) -> None:
        self._free: list[duckdb.DuckDBPyConnection] = []

    @contextmanager
    def opened(self, settings: dict[str, str]) -> Iterator[duckdb.DuckDBPyConnection]:
        """Give an empty database with these settings; it is kept unless it fails or spills."""
        kept = self._free.pop() if self._free else duckdb.connect(config={**settings})
        changes = "".join(f"SET {name} = {literal(settings[name])}; " for name in CHANGED)
        kept.execute(f"{changes}ATTACH ':memory:' AS {NAME}")
        with kept.cursor() as cursor:
            cursor.execute(f"USE {NAME}")
            yield cursor
        if Path(settings["temp_directory"]).exists():
            kept.close()
            return
        kept.execute(f"DETACH {NAME}")
        self._free.append(kept)
