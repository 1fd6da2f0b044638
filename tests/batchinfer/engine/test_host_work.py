"""What the host does in a decode step, counted in function calls: times would say more about the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.batchinfer.engine.host_work import Load, make_engine


def calls(run: Callable[[], Any]) -> int:
    """Functions that are called, Python's and C's."""
    found = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def calls_of_steps(load: Load, steps: int = 32) -> float:
    """Of a decode step, on average over two blocks of tokens."""
    engine = make_engine(load, 3 * steps)
    engine.add(load.requests(3 * steps))
    while True:
        sample = engine.step().sample
        assert sample is not None
        if sample.decode_tokens == load.rows:
            break
    engine.step()
    return calls(lambda: [engine.step() for _ in range(steps)]) / steps


@pytest.mark.parametrize("shared", [0, 256])
def test_a_decode_step_takes_the_host_a_few_calls_a_row_whatever_its_context_is(shared):
    short, long = (calls_of_steps(Load(24, prompt, shared)) for prompt in (300, 1500))
    assert long <= 1.1 * short, "work grows with contexts"
    more = calls_of_steps(Load(48, 300, shared))
    assert (more - short) / 24 < 25, "too many calls for each row"
