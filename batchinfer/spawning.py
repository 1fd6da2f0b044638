"""Starting processes that a Ctrl-C must not reach."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess

_BLOCKED = (signal.SIGINT, signal.SIGTERM)


def start_deaf(process: SpawnProcess) -> None:
    """Start a process in which SIGINT and SIGTERM are blocked from its first instruction on.

    A terminal sends SIGINT to the whole group, also to a child that is still importing and could not yet say
    that its parent decides. What comes meanwhile reaches the parent right after.
    """
    resource_tracker.ensure_running()  # its own start would unblock them again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
