"""Commands whose processes have a mark in their environment, for tests that send signals to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.batchinfer.pipeline.test_orphans import MARK, marked
from tests.batchinfer.wrong_jobs import environment
from tests.patience import PATIENCE_S, wait_until


@dataclass(frozen=True)
class MarkedCommand:
    """A running command, and the file with its output."""

    process: subprocess.Popen[bytes]
    mark: str
    said: Path

    def pids(self, who: bytes = b"") -> list[int]:
        """Return the ids of its processes with `who` on their command line."""
        found = []
        for pid in marked(self.mark):
            with suppress(FileNotFoundError, ProcessLookupError):
                if who in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "):
                    found.append(pid)
        return found


@contextmanager
def started(folder: Path, words: Sequence[str], **env: str) -> Iterator[MarkedCommand]:
    """Run `python -m words` in a folder to its end, and fail the test if a process remains."""
    mark, said = uuid.uuid4().hex, folder / "said"
    with said.open("wb") as file, subprocess.Popen(
        [sys.executable, "-m", *words], cwd=folder, env=environment(**{MARK: mark}, **env),
        start_new_session=True, stdout=file, stderr=file,
    ) as process:  # fmt: skip
        try:
            yield MarkedCommand(process, mark, said)
            process.wait(PATIENCE_S)
            wait_until(lambda: not marked(mark))
        finally:
            send(signal.SIGKILL, marked(mark))


def send(signum: signal.Signals, pids: Sequence[int]) -> bool:
    """Send a signal to processes and return True if any process still existed."""
    sent = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
            sent += 1
    return bool(sent)
