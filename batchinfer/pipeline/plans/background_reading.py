"""Reads the rest of an input in a thread, while engines run the rows that were read before."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from batchinfer.store.index.writer import RowsSoFar

_LOOK_S = 0.05  # interval of checks for the end of reading


class BackgroundReading:
    """Reads the rest of an input in a thread. Other threads can get the rows that were read so far.

    A context manager, which stops reading at the end of its block.
    """

    def __init__(
        self, ingestion: Ingestion, steps: Generator[IngestProgress, None, None], at: IngestProgress
    ) -> None:
        """Start the thread that reads.

        Args:
            ingestion: The object that reads the input and writes the index.
            steps: Iterator over the remaining steps of the ingestion. Each step reads a part of the input.
            at: Progress of the ingestion before these steps.
        """
        self.ingestion, self._steps, self.at = ingestion, steps, at
        self._turn = threading.Condition()
        self._stops = self._wanted = False
        self._snapshot: RowsSoFar | None = None
        self._thread = ThreadPoolExecutor(1, "reading")
        self._read_all: Future[None] = self._thread.submit(self._read)

    def __enter__(self) -> BackgroundReading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stops = True
        self._thread.shutdown()

    @property
    def ended(self) -> bool:
        """Return True if the thread has stopped reading, at the end of the input or with an error."""
        return self._read_all.done()

    def check(self) -> None:
        """Raise the error that ended the reading, if there is one."""
        if self.ended:
            self._read_all.result()

    def rows_so_far(self) -> RowsSoFar | None:
        """Return the rows that were read so far, or None at the end of the input. Then `finish` must be called instead.

        Only one thread may call this at a time.

        Raises:
            StorageError: The index cannot be read or written.
            OutOfMemory: DuckDB exceeded its memory limit.
        """
        with self._turn:
            self._wanted = True
            while self._wanted and not self.ended:
                self._turn.wait(_LOOK_S)
            found, self._snapshot, self._wanted = self._snapshot, None, False
        return None if found is None else self.ingestion.settle(found)

    def finish(self) -> Index:
        """Wait for the end of the input, and return the complete index.

        Raises:
            BatchInferError: An error ended the reading, or the index cannot be completed.
        """
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
            self._snapshot, self._wanted = self.ingestion.take_snapshot(), False
            self._turn.notify()
