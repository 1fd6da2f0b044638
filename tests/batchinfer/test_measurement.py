"""`doctor --measure` records nothing that was measured beside other work."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer import measurement
from batchinfer.errors import Busy
from batchinfer.measurement import MOST_BUSY, measure_hardware
from batchinfer.ops import peaks
from batchinfer.ops.peaks import MeasuredPeaks

FOUND = MeasuredPeaks(None, {"float32": 1e9}, 1e9, 1e9, 0.0)


class Load:
    """What others use, look after look."""

    cores = 2

    def __init__(self, *others: float | None) -> None:
        self._others = iter(others)

    def look(self) -> float | None:
        return next(self._others)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measurement, "LOOK_S", 0.0)
    monkeypatch.setattr(measurement, "nvidia_gpus", list)
    monkeypatch.setattr(peaks, "measure_peaks", lambda _: FOUND)


@pytest.mark.parametrize("others", [(1.5, 0.0), (0.0, 1.5)], ids=["before", "meanwhile"])
def test_a_busy_machine_is_not_measured(
    others: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(*others))
    with pytest.raises(Busy, match=r"other processes use 1\.5 of 2 cores.*--although-busy"):
        measure_hardware()
    assert not list(tmp_path.rglob("*.json"))
    assert measure_hardware(although_busy=True).exists()


@pytest.mark.parametrize("others", [(0.0, MOST_BUSY), (None, None)], ids=["quiet", "unknown"])
def test_a_quiet_machine_is(
    others: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(*others))
    assert measure_hardware().exists()
