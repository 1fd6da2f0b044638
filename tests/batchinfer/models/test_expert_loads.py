"""Tests counters of experts: which tokens they count, and which they skip."""

from __future__ import annotations

import pytest
import torch

from batchinfer.models.decoder.feed_forward import ExpertLoads


def test_counters_are_read_paused_and_restarted() -> None:
    counters = {0: torch.tensor([1, 2, 0]), 2: torch.tensor([0, 0, 3])}
    loads = ExpertLoads(counters)
    with loads.paused():
        counters[0] += 5
    assert loads.read() == {0: [1, 2, 0], 2: [0, 0, 3]}
    counters[2] += 1
    assert loads.read()[2] == [1, 1, 4]
    loads.restart()
    assert loads.read() == {0: [0, 0, 0], 2: [0, 0, 0]}


def test_a_failure_within_a_pause_counts_nothing() -> None:
    counter = torch.tensor([1])

    def fail() -> None:
        with ExpertLoads({0: counter}).paused():
            counter.add_(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert counter.item() == 1
