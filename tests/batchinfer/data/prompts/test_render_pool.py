"""Batches come back in the order they went, and no more workers are started than have something to do at once."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.data.prompts import render_pool
from batchinfer.data.prompts.render_pool import RenderPool


class Worker:
    """Answers with the rows that it was given."""

    started: list[Worker]

    def __init__(self, spec: str) -> None:
        self.rows: Any = None
        self.open = True
        self.started.append(self)

    def submit(self, rows: Any) -> None:
        assert self.rows is None, "one batch at a time"
        self.rows = rows

    def result(self) -> Any:
        done, self.rows = self.rows, None
        return done

    def close(self) -> None:
        self.open = False


@pytest.mark.parametrize(("batches", "started"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_workers_are_started_as_batches_come(
    monkeypatch: pytest.MonkeyPatch, batches: int, started: int
) -> None:
    monkeypatch.setattr(Worker, "started", [], raising=False)
    monkeypatch.setattr(render_pool, "RenderWorker", Worker)
    under_way = []

    def given() -> Any:
        for number in range(batches):
            under_way.append(sum(worker.rows is not None for worker in Worker.started))
            yield number, [f"row {number}"]

    with RenderPool("spec", 3) as pool:  # type: ignore[arg-type]
        assert list(pool.map(given())) == [(n, [f"row {n}"]) for n in range(batches)]
    assert len(Worker.started) == started
    assert under_way == [0, 1, 2, *[3] * 9][:batches], "all are busy while the next batch is read"
    assert not any(worker.open for worker in Worker.started)
