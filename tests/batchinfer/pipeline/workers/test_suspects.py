"""A row that kills engines is found by bisection, with the minimum number of deaths."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.pipeline.workers.suspects import Suspects


def requests(count: int) -> list[Request]:
    return [
        Request(bytes([n // 256, n % 256]), np.array([1], np.int32), SamplingParams(), 1)
        for n in range(count)
    ]


def deaths_until_found(count: int, killer: int) -> int:
    """Return the number of deaths until the killer ran in a group of one. All other rows are answered."""
    suspects, rows = Suspects(), requests(count)
    suspects.add(rows)
    deaths, answered = 0, 0
    while (group := suspects.take()) is not None:
        assert all(request.shares_next == 0 for request in group.requests), (
            "in a group, shares_next of the plan no longer applies"
        )
        if rows[killer].key not in {request.key for request in group.requests}:
            answered += len(group.requests)
            suspects.record_finish(group)
            continue
        deaths += 1
        if len(group.requests) > 1:
            suspects.record_death(group.requests, engine=0)
    assert answered == count - 1
    return deaths


@pytest.mark.parametrize(("count", "most", "mean"), [(1, 1, 1), (8, 4, 3.0), (64, 7, 4.5)])
def test_halving_takes_few_deaths(count: int, most: int, mean: float) -> None:
    deaths = [deaths_until_found(count, killer) for killer in range(count)]
    assert max(deaths) <= most
    assert sum(deaths) / count <= mean


def test_one_row_of_a_group_can_be_tried_first() -> None:
    suspects, rows = Suspects(), requests(5)
    suspects.add(rows)
    taken = [suspects.take(one=True), suspects.take(), suspects.take()]
    assert [None if group is None else [r.key for r in group.requests] for group in taken] == [
        [rows[0].key], [row.key for row in rows[1:]], None
    ]  # fmt: skip


def test_one_row_is_taken_far_from_those_that_died() -> None:
    suspects, rows = Suspects(), requests(8)
    suspects.record_death(rows, engine=0)
    first = suspects.take()
    assert first.requests == rows[:4]
    suspects.record_death(first.requests, engine=0)
    suspects.record_death(rows[:1], engine=0)
    taken = suspects.take(one=True)
    assert taken.requests == [rows[4]]


def test_one_row_that_died_runs_elsewhere_if_it_can() -> None:
    suspects, (row,) = Suspects(), requests(1)
    suspects.record_death([row], engine=1)
    assert suspects.take(not_of=1) is None
    group = suspects.take(not_of=0)
    assert (group.requests, group.died_in, len(suspects)) == ([row], 1, 0)
