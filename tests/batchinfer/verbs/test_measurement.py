"""`doctor --measure` records no measurement made alongside other work."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.core.errors import Busy, Unavailable
from batchinfer.engine.load import calibration
from batchinfer.engine.load.calibration import Calibration
from batchinfer.machine.hardware import detect
from batchinfer.models.ops import peaks
from batchinfer.models.ops.peaks import MeasuredPeaks
from batchinfer.pipeline.operators_build import COMPILING_FIRST
from batchinfer.plan.simulation.step_parts import PARTS, predict_seconds, step_parts
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer.verbs import measure as measurement
from batchinfer.verbs.measure import MOST_BUSY, measure_hardware
from batchinfer_kernels.cost import Peaks, StepShape
from batchinfer_kernels.cpu.background_build import BackgroundBuild
from tests.batchinfer.engine.simulation import LLAMA_135M
from tests.kernels.fake_compiler import fake_compiler

FOUND = MeasuredPeaks(
    None, {"float32": 1e9}, 1e9, 1e9, 0.0, rates={"float32": {"torch": 9e8, "compiled": 1e9}}
)


def calibrated(dtype: str, quantization: str) -> Calibration:
    """Return steps that take twice the time of their parts, and 1 ms of the host each."""
    if quantization == "int8":
        raise Unavailable("no compiler")
    slow = dict.fromkeys(PARTS, 2.0)
    shapes = [
        StepShape(tokens, 1 + n % 5, 999 * (n * n % 7 + 3), 77 * n)
        for n, tokens in enumerate((1, 9, 30, 400, 2000, 3, 70, 600, 1, 128, 16, 50))
    ]
    parts = [step_parts(LLAMA_135M, shape, shape.sampled, Peaks(1e9, 1e9)) for shape in shapes]
    steps = [
        (LLAMA_135M, shape, shape.sampled, predict_seconds(slow, part))
        for shape, part in zip(shapes, parts, strict=True)
    ]
    return Calibration(steps, [(3, 0.001), (9, 0.001)])


class Load:
    """The load by other processes in successive measurements."""

    cores = 2

    def __init__(self, *others: float | None) -> None:
        self._others = iter(others)

    def measure(self) -> float | None:
        return next(self._others)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path)[0]))
    monkeypatch.setattr(measurement, "LOOK_S", 0.0)
    monkeypatch.setattr(measurement, "nvidia_gpus", list)
    monkeypatch.setattr(peaks, "measure_peaks", lambda _: FOUND)
    monkeypatch.setattr(peaks, "measure_layers", lambda dtypes: {dtype: {"torch": 7e8} for dtype in dtypes})
    monkeypatch.setattr(measurement, "has_fast_bf16", lambda: False)
    monkeypatch.setattr(calibration, "calibrate", calibrated)


@pytest.mark.parametrize("others", [(1.5, 0.0), (0.0, 1.5)], ids=["before", "meanwhile"])
def test_a_busy_machine_is_not_measured(
    others: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(*others))
    with pytest.raises(Busy, match=r"other processes use 1\.5 of 2 cores.*--although-busy"):
        measure_hardware()
    assert not list(tmp_path.rglob("*.json"))
    assert measure_hardware(although_busy=True).exists()


def test_operators_are_compiled_before_the_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler would otherwise count as another user of the cores."""
    notices: list[str] = []
    looks: list[bool] = []

    def load() -> Load:
        looks.append(BackgroundBuild.needed() is None)
        return Load(0.0, 0.0)

    monkeypatch.setattr(measurement, "CoreLoad", load)
    measure_hardware(notice=notices.append)
    assert looks == [True]
    assert notices[0] == COMPILING_FIRST
    assert "compiled the CPU operators in" in notices[1]
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(0.0, 0.0))
    measure_hardware(notice=notices.append)
    assert len(notices) == 2


@pytest.mark.parametrize("others", [(0.0, MOST_BUSY), (None, None)], ids=["quiet", "unknown"])
def test_a_quiet_machine_is(
    others: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(*others))
    assert measure_hardware().exists()


def test_measured_step_times_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read back as step times. Without a compiler, int8 is missing."""
    monkeypatch.setattr(measurement, "CoreLoad", lambda: Load(0.0, 0.0))
    measure_hardware()
    here = detect("cpu")
    large, layers = {"torch": 9e8, "compiled": 1e9}, {"torch": 7e8}
    assert here.products == {"float32": {"large": large, "layers": layers}}
    assert set(here.step_times) == {"float32"}
    assert here.step_time("float32", "int8") is None
    peaks, times = here.peaks("float32"), here.step_time("float32")
    assert peaks is not None
    assert times is not None
    found = StepTime.calibrated(peaks, times)
    assert found is not None
    assert found.host_s(5) == pytest.approx(0.001)
    shape = StepShape(25, 3, 4995, 154)
    expected = predict_seconds(dict.fromkeys(PARTS, 2.0), step_parts(LLAMA_135M, shape, 3, peaks))
    assert found.device_s(shape, LLAMA_135M, 3) == pytest.approx(expected)
