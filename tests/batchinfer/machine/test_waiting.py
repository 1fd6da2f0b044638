"""A wait counts only the seconds in which this process could run."""

from __future__ import annotations

import pytest

from batchinfer.machine.waiting import WaitTimer


def test_a_poll_counts_for_a_bounded_time() -> None:
    """A stopped terminal, container or virtual machine pauses both processes, but not the clock."""
    now = 100.0
    waited = WaitTimer(most_s=0.5, clock=lambda: now)
    for passed, seconds in ((0.25, 0.25), (0.3, 0.55), (13.0, 1.05), (0.1, 1.15)):
        now += passed
        assert waited.update() == pytest.approx(seconds)
    waited.reset()
    now += 0.2
    assert waited.update() == pytest.approx(0.2)
