"""SIGINT, SIGTERM and SIGHUP: at once where that is safe, at the next good moment where work would be lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from batchinfer.core.errors import Interrupted

CONTINUES = "interrupted; the same command continues where it stopped"


class Interrupts:
    """Turns signals into `Interrupted`. While deferred, the first one only sets `pending`; a second one raises."""

    def __init__(self, message: str = CONTINUES) -> None:
        self._message = message
        self.pending: int | None = None
        self._deferred = False

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle the signals within this block (main thread only). What `nohup` had ignored stays so."""
        hears = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            hears.append(signal.SIGHUP)
        before = {signum: signal.signal(signum, self._handle) for signum in hears}
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def deferred(self) -> Iterator[Interrupts]:
        """Let the caller look at `pending` itself within this block: a first signal raises nothing."""
        self._deferred = True
        try:
            yield self
        finally:
            self._deferred = False

    @contextmanager
    def retold(self) -> Iterator[None]:
        """DuckDB turns what a signal raises during a query into a RuntimeError: here it is `Interrupted` again."""
        try:
            yield
        except RuntimeError as error:
            if self.pending is None:
                raise
            raise Interrupted(self.pending, self._message) from error

    def raise_pending(self, message: str) -> None:
        """Raises Interrupted when a signal has come."""
        if self.pending is not None:
            raise Interrupted(self.pending, message)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again = self.pending is not None
        self.pending = signum
        if again or not self._deferred:
            raise Interrupted(signum, self._message)
