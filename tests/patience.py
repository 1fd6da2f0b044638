"""Waits in tests for other processes: for an event, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a failing test waits this long: a second of work on an idle machine may take a minute on a busy one.
PATIENCE_S = 300.0


def wait_until(what: Callable[[], object]) -> None:
    """Wait until `what()` returns a true value."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
