"""The time that a rank of a stage waits for those of other stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageWait:
    """Adds up the seconds for which a rank of this process has waited."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
