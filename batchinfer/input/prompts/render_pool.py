"""A pool of render workers: sends chunks to idle workers, and yields the prepared rows in order."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Generic, TypeVar

from batchinfer.core.request import RowError
from batchinfer.input.chunk import InputChunk
from batchinfer.input.prompts.prepared.rows import PreparedRows
from batchinfer.input.prompts.render_worker import RenderSpec, RenderWorker
from batchinfer.input.prompts.shared_file import put, shared_file
from batchinfer.input.rows import Values
from batchinfer.machine.waiting import LOOK_S

Tag = TypeVar("Tag")
# Called with a process, its activity, start and end times
ActivityCallback = Callable[[str, str, float, float], None]
_AHEAD = 2  # unfinished chunks per worker; an idle worker finds the next one ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyChunk(InputChunk):
    """A chunk whose rows were already prepared by an earlier run, so that no render worker needs to read it.

    Args:
        prepared: The prompts of the rows, and the facts about them.
    """

    prepared: PreparedRows

    def read(
        self, start: int = 0, stop: int | None = None, values: Collection[str] | None = None
    ) -> Iterator[Values | RowError]:
        """Raise ValueError, because the chunk has no unparsed rows."""
        raise ValueError("the rows of this chunk are prepared already")


@dataclass(slots=True)
class _ChunkWork(Generic[Tag]):
    tag: Tag
    chunk: InputChunk
    rows: int
    done: PreparedRows | None = None


class RenderPool(Generic[Tag]):
    """A pool of render workers: processes that turn chunks of rows into prompts. A context manager.

    A worker process is only started for a chunk for which no process is idle. A short input therefore needs one
    process, and a ReadyChunk needs none.

    Args:
        spec: The settings of the workers.
        workers: The maximum number of workers.
        on_activity: Called when the pool closes, for each worker and activity, with the name of the worker, the
            activity ("starting" or "reading rows"), and its start and end (of `time.perf_counter`).
    """

    def __init__(self, spec: RenderSpec, workers: int, on_activity: ActivityCallback | None = None) -> None:
        self._spec, self._most, self._on_activity = spec, workers, on_activity
        self._events = selectors.DefaultSelector()
        self._definition = shared_file()
        put(self._definition, spec.definition.encode())
        self._all: list[RenderWorker] = []
        self._free: list[RenderWorker] = []
        self._waiting: deque[_ChunkWork[Tag]] = deque()
        self._at_work: dict[RenderWorker, _ChunkWork[Tag]] = {}
        self._looked = monotonic()

    def __enter__(self) -> RenderPool[Tag]:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.close()
        self._report()
        self._events.close()
        os.close(self._definition)

    def _report(self) -> None:
        if self._on_activity is not None:
            now = perf_counter()
            for number, worker in enumerate(self._all):
                ready = now if worker.ready_at is None else worker.ready_at
                self._on_activity(f"reader {number}", "starting", worker.began, ready)
                self._on_activity(f"reader {number}", "reading rows", ready, now)

    def map(self, chunks: Iterable[tuple[Tag, InputChunk, int] | None]) -> Iterator[tuple[Tag, PreparedRows]]:
        """Prepare chunks in parallel, and yield (tag, prepared rows) in the order of the chunks.

        Args:
            chunks: (tag, chunk, maximum number of rows to read) for each chunk; `tag` is any object of the caller.
                None is a barrier: the next chunk is only requested when the rows of all earlier chunks were yielded.
        """
        under_way: deque[_ChunkWork[Tag]] = deque()
        for given in chunks:
            if given is None:
                yield from self._finished(under_way, 0)
                continue
            work = _ChunkWork(*given)
            under_way.append(work)
            if isinstance(work.chunk, ReadyChunk):
                work.done = work.chunk.prepared
            else:
                self._assign(work)
            yield from self._finished(under_way, _AHEAD * self._most - 1)
        yield from self._finished(under_way, 0)

    def _finished(self, under_way: deque[_ChunkWork[Tag]], most: int) -> Iterator[tuple[Tag, PreparedRows]]:
        self._attend(0)
        while under_way and (len(under_way) > most or under_way[0].done is not None):
            while (done := under_way[0].done) is None:
                self._attend(LOOK_S)
            yield under_way.popleft().tag, done

    def _assign(self, work: _ChunkWork[Tag]) -> None:
        self._waiting.append(work)
        if self._free:
            self._submit(self._free.pop())
        elif len(self._all) < self._most:
            self._all.append(RenderWorker(self._spec, self._definition, self._events))

    def _submit(self, worker: RenderWorker) -> None:
        work = self._at_work[worker] = self._waiting.popleft()
        worker.submit(work.chunk, work.rows)

    def _attend(self, within_s: float) -> None:
        for key, _ in self._events.select(within_s):
            worker: RenderWorker = key.data
            done = worker.attend()
            if done is not None:
                self._at_work.pop(worker).done = done
            if worker.idle and self._waiting:
                self._submit(worker)
            elif worker.idle and worker not in self._free:
                self._free.append(worker)
        if monotonic() - self._looked > LOOK_S:
            self._looked = monotonic()
            for worker in self._all:
                worker.replace_if_silent()
