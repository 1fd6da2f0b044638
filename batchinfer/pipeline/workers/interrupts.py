"""Handles SIGINT, SIGTERM, SIGHUP and the stop time of a run, immediately or at the next safe point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

from batchinfer.core.errors import BatchInferError, Interrupted, StopTimeReached

CONTINUES = "interrupted; the same command continues where it stopped"
# Interval of checks of the wall clock. A single long wait would be wrong after a suspend or a change of the clock.
LOOK_S = 1.0


def _now() -> datetime:
    return datetime.now(UTC)


class Interrupts:
    """Raises `Interrupted` for a signal, and `StopTimeReached` at the stop time of the run.

    Within `deferred`, the first signal only sets `pending` to its number, and a second signal raises. The stop time is
    handled like the signal SIGTERM.
    """

    def __init__(self, message: str = CONTINUES, clock: Callable[[], datetime] = _now) -> None:
        self._message, self._clock = message, clock
        self.pending: int | None = None
        self._deferred = False
        self._installed = False
        self._is_stop = False  # whether the stop time is pending, and not a signal
        self._due = False  # whether the next SIGTERM comes from this class
        self._stop_message = ""
        self._stop_watch: threading.Thread | None = None
        self._over = threading.Event()

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Handle SIGINT, SIGTERM and SIGHUP within the block, which must run in the main thread.

        SIGHUP stays ignored if it was ignored before, as under `nohup`.
        """
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handled.append(signal.SIGHUP)
        before = {signum: signal.signal(signum, self._handle) for signum in handled}
        self._installed = True
        try:
            yield self
        finally:
            self._installed = False
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def deferred(self) -> Iterator[Interrupts]:
        """Defer the first signal within the block: it only sets `pending`, which the caller must check."""
        self._deferred = True
        try:
            yield self
        finally:
            self._deferred = False

    @contextmanager
    def stopping_at(self, at: datetime | None, message: str = "") -> Iterator[None]:
        """Raise StopTimeReached within the block at a given time.

        Within `deferred`, and unless signal handlers are installed (`installed`), the stop time only sets `pending`.

        Args:
            at: The stop time. None: there is none.
            message: The message of StopTimeReached.
        """
        if at is None:
            yield
            return
        self._stop_message = message
        self._over.clear()
        self._stop_watch = threading.Thread(target=self._watch, args=(at,), daemon=True, name="stop time")
        self._stop_watch.start()
        try:
            yield
        finally:
            self.ignore_stop()

    def ignore_stop(self) -> None:
        """Ignore the stop time from now on. If it was deferred, it is no longer pending."""
        if self._stop_watch is None:
            return
        before, self._deferred = self._deferred, True  # the time may come right now
        try:
            self._over.set()
            self._stop_watch.join()
        finally:
            self._deferred, self._stop_watch = before, None
        if self._is_stop:
            self.pending, self._is_stop = None, False

    @property
    def is_stop_pending(self) -> bool:
        """Return True if the stop time has come and was deferred. False for a deferred signal."""
        return self.pending is not None and self._is_stop

    @contextmanager
    def reraised(self) -> Iterator[None]:
        """Raise `Interrupted` in place of the RuntimeError that DuckDB raises if a signal comes during a query."""
        try:
            yield
        except RuntimeError as error:
            if self.pending is None:
                raise
            raise self._error(self._message) from error

    def raise_pending(self, message: str) -> None:
        """Raise Interrupted if a deferred signal is pending, or StopTimeReached if the deferred stop time is pending.

        Otherwise do nothing.

        Args:
            message: The message of Interrupted.
        """
        if self.pending is not None:
            raise self._error(message)

    def _error(self, message: str) -> BatchInferError:
        if self._is_stop:
            return StopTimeReached(self._stop_message)
        assert self.pending is not None, "a signal came"
        return Interrupted(self.pending, message)

    def _watch(self, at: datetime) -> None:
        while (left_s := (at - self._clock()).total_seconds()) > 0:
            if self._over.wait(min(left_s, LOOK_S)):
                return
        if self._installed:
            self._due = True
            main = threading.main_thread().ident
            assert main is not None, "the main thread runs"
            signal.pthread_kill(main, signal.SIGTERM)  # also interrupts a wait or a query of the main thread
        elif self.pending is None:
            self.pending, self._is_stop = signal.SIGTERM, True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        is_stop = self._due and signum == signal.SIGTERM
        if is_stop:
            self._due = False
            if self.pending is not None or self._over.is_set():  # the run stops already, or needs no stop
                return
        again = self.pending is not None
        self.pending, self._is_stop = signum, is_stop
        if again or not self._deferred:
            raise self._error(self._message)
