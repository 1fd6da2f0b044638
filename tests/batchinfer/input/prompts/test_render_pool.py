"""Tests that prepared rows return in the order of the chunks, and that no idle workers start."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from typing import Any

import pytest

from batchinfer.input.prompts import render_pool
from batchinfer.input.prompts.render_pool import RenderPool

LATE = 4  # the first chunk takes the time of this number of others


class Worker:
    """Answers with its chunk: the first worker only after LATE other chunks were given out, others at once."""

    started: list[Worker]
    given: int

    def __init__(self, spec: Any, definition: int, events: selectors.BaseSelector) -> None:
        self._read, self._write = os.pipe()
        self._events, self._ready = events, False
        self.chunk: Any = None
        events.register(self._read, selectors.EVENT_READ, self)
        os.write(self._write, b"r")
        self.started.append(self)

    @property
    def idle(self) -> bool:
        return self._ready and self.chunk is None

    def submit(self, chunk: Any, rows: int) -> None:
        assert self.chunk is None, "one chunk at a time"
        assert rows == len(chunk)
        self.chunk = chunk
        Worker.given += 1
        if Worker.given == LATE:
            os.write(self.started[0]._write, b"d")
        if Worker.given > 1:
            os.write(self._write, b"d")

    def attend(self) -> Any:
        if os.read(self._read, 1) == b"r":
            self._ready = True
            return None
        done, self.chunk = self.chunk, None
        return done

    def replace_if_silent(self) -> None:
        pass

    def close(self) -> None:
        self._events.unregister(self._read)
        os.close(self._read)
        os.close(self._write)
        self.chunk = "closed"


class Spec:
    definition = "{}"


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    monkeypatch.setattr(render_pool, "RenderWorker", Worker)
    monkeypatch.setattr(Worker, "started", [], raising=False)
    monkeypatch.setattr(Worker, "given", 0, raising=False)
    return Worker.started


@pytest.mark.parametrize(("chunks", "started"), [(0, 0), (4, 3), (30, 3)])
def test_chunks_come_back_in_order(workers: list[Worker], chunks: int, started: int) -> None:
    given = [(number, [f"row {number}"], 1) for number in range(chunks)]
    asked_ahead = []

    def ahead() -> Iterator[Any]:
        for one in given:
            asked_ahead.append(one[0])
            yield one

    with RenderPool(Spec(), 3) as pool:  # type: ignore[arg-type]
        for number, (tag, rows) in enumerate(pool.map(ahead())):  # type: ignore[arg-type]
            assert (tag, rows) == (number, [f"row {number}"])
            assert len(asked_ahead) - number <= 6, "memory is bounded"
    assert len(workers) == started
    assert [worker.chunk for worker in workers] == ["closed"] * started


def test_the_pool_can_finish_submitted_chunks(workers: list[Worker]) -> None:
    Worker.given = LATE
    done: list[int] = []
    seen = []

    def chunks() -> Iterator[Any]:
        for number in range(5):
            yield number, ["row"], 1
            yield None
            seen.append(list(done))

    with RenderPool(Spec(), 3) as pool:  # type: ignore[arg-type]
        for tag, _ in pool.map(chunks()):  # type: ignore[arg-type]
            done.append(tag)
    assert seen == [list(range(number + 1)) for number in range(5)]
    assert len(workers) == 1, "a free worker takes the next chunk"
