"""Engine threads stop spinning while other processes use the cores, and spin again afterwards."""

from __future__ import annotations

import pytest

from batchinfer.pipeline.workers.shared_cores import LOOK_EVERY_S, SharedCores


class Spins:
    """Remembers its last setting."""

    short = False

    def shorten(self) -> None:
        self.short = True

    def lengthen(self) -> None:
        self.short = False


class Load:
    """The load of a machine with two cores."""

    cores = 2

    def __init__(self) -> None:
        self.others: float | None = 0.0
        self.looks = 0

    def measure(self) -> float | None:
        self.looks += 1
        return self.others


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("threads", "others", "short"),
    [(2, 0.0, False), (2, 0.2, False), (2, 0.5, True), (2, 2.0, True), (1, 1.0, False), (1, 1.5, True)],
)
def test_threads_that_leave_others_no_core_spin_shortly(threads: int, others: float, short: bool) -> None:
    clock, load, spins = Clock(), Load(), Spins()
    cores = SharedCores(threads, spins, load, clock)  # type: ignore[arg-type]
    load.others = others
    clock.now = LOOK_EVERY_S
    cores.tick()
    assert spins.short is short
    load.others = 0.0
    clock.now *= 2
    cores.tick()
    assert not spins.short
    assert cores.other_cores == pytest.approx(others / 2)


def test_a_look_is_taken_now_and_then_only() -> None:
    clock, load = Clock(), Load()
    cores = SharedCores(2, Spins(), load, clock)  # type: ignore[arg-type]
    for _ in range(100):
        clock.now += LOOK_EVERY_S / 10
        cores.tick()
    assert 9 <= load.looks <= 10


def test_an_unknown_load_changes_nothing() -> None:
    clock, load, spins = Clock(), Load(), Spins()
    cores = SharedCores(2, spins, load, clock)  # type: ignore[arg-type]
    load.others, spins.short = None, True
    clock.now = 1.0
    cores.tick()
    assert spins.short
    assert cores.other_cores is None
