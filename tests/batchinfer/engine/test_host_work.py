"""Counts the host's function calls in a decode step: times would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from batchinfer.engine.tensors import staging
from tests.batchinfer.engine.host_work import Load, NoModel, decoding


def calls(run: Callable[[], Any]) -> int:
    """Return the number of function calls in Python and C."""
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
    """Return the calls per decode step, on average over two blocks of tokens."""
    engine = decoding(load, 3 * steps)
    engine.step()
    return calls(lambda: [engine.step() for _ in range(steps)]) / steps


def sent(load: Load, monkeypatch: pytest.MonkeyPatch, steps: int = 16) -> int:
    """Return the bytes that decode steps copy to the device, from the second step in which rows end."""
    model, total, staged = NoModel(), 0, staging._staged
    engine = decoding(load, 4 * steps, model)
    model.ends = load.ends
    engine.step()
    engine.step()

    def counted(arrays: staging.Arrays, device: Any) -> Any:
        nonlocal total
        total += sum(array.nbytes for array in arrays)
        return staged(arrays, device)

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_staged", counted)
        for _ in range(steps):
            engine.step()
    return total


def test_only_new_entries_of_block_tables_are_sent_even_when_rows_end(monkeypatch):
    short, long = (sent(Load(24, prompt, ends=1), monkeypatch) for prompt in (304, 1504))
    assert long < 1.05 * short
    assert long < 16 * 24 * 48, "more than some words a row and step"


@pytest.mark.parametrize("shared", [0, 256])
def test_a_decode_step_needs_few_host_calls_per_row_for_any_context(shared):
    short, long = (calls_of_steps(Load(24, prompt, shared)) for prompt in (300, 1500))
    assert long <= 1.1 * short, "work grows with contexts"
    more = calls_of_steps(Load(48, 300, shared))
    assert (more - short) / 24 < 25, "too many calls for each row"
