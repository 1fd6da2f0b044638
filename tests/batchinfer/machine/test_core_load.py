"""CPU use of other processes: the kernel's total minus this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.machine.core_load import CoreLoad

TICKS = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))


class Machine:
    """Counts CPU time as the kernel does. This process may not use the core `foreign`."""

    def __init__(self, folder: Path) -> None:
        self.stat = folder / "stat"
        self.now = self.own = self.busy = self.foreign = 0.0
        self.write()

    def write(self) -> None:
        waits = int(self.now * TICKS)  # idle, I/O wait and steal: no process works
        first = f"cpu{CORES[0]} {int(self.busy * TICKS)} 0 0 {waits} {waits} 0 0 {waits} 0 0"
        foreign = f"cpu{CORES[-1] + 1} {int(self.foreign * TICKS)} 0 0 0 0 0 0 0 0 0"
        self.stat.write_text(f"cpu 1 2 3 4 5 6 7 8 9 10\n{first}\n{foreign}\nintr 1 2\n")

    def load(self) -> CoreLoad:
        return CoreLoad(self.stat, lambda: self.now, lambda: self.own)

    def passes(self, seconds: float, own: float, others: float, foreign: float = 0.0) -> None:
        self.now += seconds
        self.own += own
        self.busy += own + others
        self.foreign += foreign
        self.write()


def test_only_cpu_use_of_other_processes_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    load = machine.load()
    machine.passes(2.0, own=1.0, others=1.0, foreign=2.0)
    assert load.measure() == pytest.approx(0.5)
    machine.passes(1.0, own=1.0, others=0.0)
    assert load.measure() == pytest.approx(0.0)
    assert load.measure() is None, "no time has passed"
    assert load.cores == len(CORES)


def test_rounding_stays_between_zero_and_the_number_of_cores(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    load = machine.load()
    machine.passes(1.0, own=0.5, others=-0.01)
    assert load.measure() == 0.0
    machine.passes(1.0, own=0.0, others=len(CORES) + 0.5)
    assert load.measure() == len(CORES)


@pytest.mark.parametrize("text", [None, "cpu 1 2 3 4 5 6 7 8 9 10\n"])
def test_without_kernel_counts_the_load_is_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    times = iter([0.0, 1.0])
    load = CoreLoad(tmp_path / "stat", lambda: next(times), lambda: 0.0)
    assert load.measure() is None


def test_this_machine_reports_its_load() -> None:
    load = CoreLoad()
    sum(range(3_000_000))
    others = load.measure()
    assert 0 <= others <= len(CORES)
