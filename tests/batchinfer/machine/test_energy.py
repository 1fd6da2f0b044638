"""Energy counters: sums across counter overflows, and null for unreadable counters."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchinfer.machine import energy
from batchinfer.machine.energy import (
    READ_EVERY_S,
    Counter,
    EnergyMeter,
    EnergyUse,
    nvml_counters,
    rapl_counters,
)


def zone(folder: Path, name: str, kind: str, microjoules: int, most: int = 1_000_000) -> Path:
    found = folder / name
    found.mkdir(parents=True)
    (found / "name").write_text(f"{kind}\n")
    (found / "energy_uj").write_text(f"{microjoules}\n")
    (found / "max_energy_range_uj").write_text(f"{most}\n")
    return found


def test_packages_are_summed_and_their_parts_and_the_platform_are_not(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    two = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    part = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    platform = zone(tmp_path, "intel-rapl:2", "psys", 0)
    meter = EnergyMeter(rapl_counters(tmp_path), (), clock=lambda: 0.0)
    (one / "energy_uj").write_text("100000")  # the counter overflowed at one joule
    for other in (two, part, platform):
        (other / "energy_uj").write_text("500000")
    assert meter.read() == EnergyUse(pytest.approx(0.2 + 0.5), None)
    assert meter.read().total_j == pytest.approx(0.7)
    (one / "energy_uj").unlink()  # later sums would be incomplete
    assert meter.read() == EnergyUse(None, None)
    assert meter.read().total_j is None


def test_without_a_counter_energy_is_unknown(tmp_path: Path) -> None:
    assert rapl_counters(tmp_path) == []
    broken = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    (broken / "max_energy_range_uj").unlink()  # like a counter that only root may read
    assert rapl_counters(tmp_path) == []
    assert EnergyMeter((), ()).read() == EnergyUse(None, None)


def test_counters_are_looked_at_before_they_start_again() -> None:
    now, values = [0.0], iter([0.0, 60e3, 20e3, 90e3])
    meter = EnergyMeter([Counter(lambda: next(values), 100e3)], (), clock=lambda: now[0])
    for time in (1, READ_EVERY_S, READ_EVERY_S + 1, 2 * READ_EVERY_S):
        now[0] = time
        meter.poll()
    assert meter.read().cpu_j == 190e3


class FakeNvml(SimpleNamespace):
    """Fake `pynvml` functions. A GPU's counter rises by 1,500 mJ per read."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__(asked=[], total=0, fails=False)

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        self.asked.append(name)
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        if self.fails:
            raise self.NVMLError("Not Supported")
        self.total += 1500
        return int(self.total)


@pytest.mark.parametrize(("gpus", "joules"), [(["GPU-ab"], 1.5), (["GPU-ab", "GPU-cd"], 6.0)])
def test_energy_of_all_used_gpus_is_added(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], joules: float
) -> None:
    """All GPUs share one counter, which rises with each read: two GPUs count four rises between their reads."""
    nvml = FakeNvml()
    nvml.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter((), nvml_counters(gpus))
    assert nvml.asked == gpus
    assert meter.read() == EnergyUse(None, joules)
    nvml.fails = True
    assert meter.read() == EnergyUse(None, None)
    assert nvml_counters(["GPU-ab"]) == []
    nvml.fails = False
    monkeypatch.setattr(energy, "find_spec", lambda _: None)  # pynvml is not installed
    assert nvml_counters(["GPU-ab"]) == []


@pytest.mark.parametrize(("gap_s", "known"), [(99.0, True), (101.0, False)])
def test_a_counter_that_may_have_overflowed_twice_is_ignored(gap_s: float, known: bool) -> None:
    now, joules = [0.0], iter([0.0, 5.0])
    meter = EnergyMeter([Counter(lambda: next(joules), 100_000.0)], (), clock=lambda: now[0])
    now[0] = gap_s
    assert meter.read().cpu_j == (5.0 if known else None)
