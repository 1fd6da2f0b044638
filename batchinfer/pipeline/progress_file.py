"""Writes `progress.json` in the state folder, from which `batchinfer status` reads the progress of a run."""

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
        ProgressState,  # its import takes 50 ms, and `batchinfer status` only reads the file
    )

PROGRESS_FORMAT = 1
STARTING = "starting"
_NO_PHASE = dict.fromkeys(("phase", "tokens", "tokens_total", "share", "per_s", "left_s"))


class ProgressFile:
    """Writes the progress of a run to `progress.json`, which `batchinfer status` reads.

    If the file cannot be written, the user gets one notice, and the run continues.
    """

    def __init__(
        self, state: StateFolder, identity: Mapping[str, str], notice: Callable[[str], None]
    ) -> None:
        """Prepare to write the file. The run must hold the lock of its job.

        Args:
            state: The state folder of the run.
            identity: Keys and values that identify the run. The file contains them.
            notice: Called with the text of the first storage error.
        """
        self._path, self._ops, self._notice = state.progress, state.ops, notice
        self._content: dict[str, Any] = {"format": PROGRESS_FORMAT, "pid": os.getpid(), **identity}
        self._notified = False

    def write_start(self) -> None:
        """Write the file for a run that has just started."""
        self._write(phase=STARTING)

    def __call__(self, state: ProgressState) -> None:
        """Write the current progress to the file.

        Args:
            state: Phase, counts and speed of the run.
        """
        self._write(**asdict(state))

    def write_end(self, exit_code: int | None, exit_status: str | None) -> None:
        """Write how the run ended. The last progress stays in the file unless the result was published.

        Args:
            exit_code: Exit code of the command.
            exit_status: `exit_status` of the run table, such as "published".
        """
        whole = exit_status is not None and is_published(exit_status)
        facts = {**_NO_PHASE, "rows": self._content.get("rows_total")} if whole else {}
        self._write(exit_code=exit_code, exit_status=exit_status, **facts)

    def _write(self, **facts: Any) -> None:
        memory = resident_memory() or peak_memory()
        self._content |= {"updated_at": datetime.now(UTC).isoformat(), "memory_bytes": memory, **facts}
        try:
            replace_bytes(self._path, (json.dumps(self._content) + "\n").encode(), self._ops)
        except StorageError as error:
            if not self._notified:
                self._notice(f"`batchinfer status` will not show this run's progress: {error}")
            self._notified = True
