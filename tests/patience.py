"""How tests wait for what other processes do: for the thing itself, never for so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a test that fails waits for so long: what takes a second on a quiet machine may take a minute beside other work.
PATIENCE_S = 300.0


def wait_until(what: Callable[[], object]) -> None:
    """Until `what()` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)
