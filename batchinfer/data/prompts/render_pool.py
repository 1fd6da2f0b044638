"""A few render workers in a row: batches go out as workers are free and come back in the order they went."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from batchinfer.data.input.rows import Values
from batchinfer.data.prompts.prepare import Prepared
from batchinfer.data.prompts.render_worker import RenderSpec, RenderWorker
from batchinfer.machine.cpus import usable_cpus

Tag = TypeVar("Tag")


class RenderPool:
    """Use as a context manager; at most `workers` batches are under way.

    A worker is started with the first batch that finds no free one: an input of one batch needs no second process.
    """

    def __init__(self, spec: RenderSpec, workers: int | None = None) -> None:
        self._spec, self._most = spec, workers or min(2, usable_cpus())
        self._free: deque[RenderWorker] = deque()
        self._all: list[RenderWorker] = []

    def __enter__(self) -> RenderPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.close()

    def map(self, batches: Iterable[tuple[Tag, Sequence[Values]]]) -> Iterator[tuple[Tag, Prepared]]:
        """(tag, rows) in, (tag, prepared rows) out, in order."""
        under_way: deque[tuple[Tag, RenderWorker]] = deque()
        for tag, rows in batches:
            done = self._oldest(under_way) if len(under_way) == self._most else None
            worker = self._free.popleft() if self._free else self._started()
            worker.submit(rows)
            under_way.append((tag, worker))
            if done is not None:  # only now, so that the worker is busy while the caller looks at it
                yield done
        while under_way:
            yield self._oldest(under_way)

    def _started(self) -> RenderWorker:
        self._all.append(RenderWorker(self._spec))
        return self._all[-1]

    def _oldest(self, under_way: deque[tuple[Tag, RenderWorker]]) -> tuple[Tag, Prepared]:
        tag, worker = under_way.popleft()
        prepared = worker.result()
        self._free.append(worker)
        return tag, prepared
