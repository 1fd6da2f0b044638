"""The reading of an input that goes on in a thread of its own, while engines run the rows that were read before."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from batchinfer.store.index.writer import RowsSoFar

_LOOK_S = 0.05  # in case that the reading ends meanwhile


class ReadingOn:
    """Use as a context manager: leaving it stops the reading. A thread takes the steps of an ingestion; another one may
    ask for the rows so far."""

    def __init__(
        self, ingestion: Ingestion, steps: Generator[IngestProgress, None, None], at: IngestProgress
    ) -> None:
        """steps: those of the ingestion, some of which were taken. at: the last of them."""
        self.ingestion, self._steps, self.at = ingestion, steps, at
        self._turn = threading.Condition()
        self._stops = self._wanted = False
        self._cut: RowsSoFar | None = None
        self._thread = ThreadPoolExecutor(1, "reading")
        self._read_all: Future[None] = self._thread.submit(self._read)

    def __enter__(self) -> ReadingOn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stops = True
        self._thread.shutdown()

    @property
    def ended(self) -> bool:
        """Whether nothing more is read: the input has ended, or something has ended the reading."""
        return self._read_all.done()

    def check(self) -> None:
        """Raise what ended the reading, if it was not the end of the input."""
        if self.ended:
            self._read_all.result()

    def rows_so_far(self) -> RowsSoFar | None:
        """Return the rows so far, settled; None: the input has ended, and `finish` is what is left to do. For one
        thread at a time. Raises what `Ingestion.settle` raises."""
        with self._turn:
            self._wanted = True
            while self._wanted and not self.ended:
                self._turn.wait(_LOOK_S)
            found, self._cut, self._wanted = self._cut, None, False
        return None if found is None else self.ingestion.settle(found)

    def finish(self) -> Index:
        """Return the index, once the input has ended. Raises what ended the reading, and as `Ingestion.finish`."""
        self._read_all.result()
        return self.ingestion.finish()

    def _read(self) -> None:
        try:
            for at in self._steps:
                self.at = at
                if self._stops:
                    return
                if self._wanted:
                    self._hand_out()
        finally:
            self._steps.close()

    def _hand_out(self) -> None:
        with self._turn:
            self._cut, self._wanted = self.ingestion.cut(), False
            self._turn.notify()
