"""A run's progress on disk, so that other processes see how far it is: `progress.json` in its part of the state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import replace_bytes
from batchinfer.filesystem.state import StateFolder
from batchinfer.machine.memory import peak_memory, resident_memory
from batchinfer.report.tables.exit_status import is_published

if TYPE_CHECKING:
    from batchinfer.report.progress import (
        ProgressState,  # 50 ms that `status` need not take: it only reads files
    )

PROGRESS_FORMAT = 1
STARTING = "starting"
_NO_PHASE = dict.fromkeys(("phase", "tokens", "tokens_total", "share", "per_s", "left_s"))


class ProgressFile:
    """Called with each state of the progress, it writes the file. A disk that fails is told once, and fails no run."""

    def __init__(
        self, state: StateFolder, identity: Mapping[str, str], notice: Callable[[str], None]
    ) -> None:
        """`identity` says which run it is; the caller holds its lock."""
        self._path, self._ops, self._notice = state.progress, state.ops, notice
        self._known: dict[str, Any] = {"format": PROGRESS_FORMAT, "pid": os.getpid(), **identity}
        self._told = False

    def begin(self) -> None:
        """The run has its lock."""
        self._write(phase=STARTING)

    def __call__(self, state: ProgressState) -> None:
        self._write(**asdict(state))

    def ended(self, exit_code: int | None, exit_status: str | None) -> None:
        """Write how the run ended. What was known last stays, unless the run is whole: then no phase is under way."""
        whole = exit_status is not None and is_published(exit_status)
        facts = {**_NO_PHASE, "rows": self._known.get("rows_total")} if whole else {}
        self._write(exit_code=exit_code, exit_status=exit_status, **facts)

    def _write(self, **facts: Any) -> None:
        memory = resident_memory() or peak_memory()
        self._known |= {"updated_at": datetime.now(UTC).isoformat(), "memory_bytes": memory, **facts}
        try:
            replace_bytes(self._path, (json.dumps(self._known) + "\n").encode(), self._ops)
        except StorageError as error:
            if not self._told:
                self._notice(f"`batchinfer status` will not show this run's progress: {error}")
            self._told = True
