"""The time that a rank spends on others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SpentTime:
    """Adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time inside."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def restart(self) -> None:
        """Forget what was counted."""
        self.seconds = 0.0
