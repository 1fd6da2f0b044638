"""Starting processes that a Ctrl-C or a closed terminal must not reach."""

from __future__ import annotations

import signal
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess

_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_deaf(process: SpawnProcess) -> None:
    """Start a process in which SIGINT, SIGTERM and SIGHUP are blocked from its first instruction on.

    A terminal sends SIGINT and SIGHUP to the whole group, also to a child that is still importing and could not yet
    say that its parent decides. What comes meanwhile reaches the parent right after.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        resource_tracker.ensure_running()  # a process, too: SIGHUP must not end it. Its start unblocks the others
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """For a child's first lines: what ends the group is the parent's to handle, also should it get unblocked."""
    for signum in _BLOCKED:
        signal.signal(signum, signal.SIG_IGN)
