"""The machine's own energy counters: those of its CPUs (RAPL) and of the GPU that computes (NVML).

They count all that runs on the machine, and what it takes while it waits. Where there is no counter, or it may not be
read (Linux lets only root read RAPL), energy is not known: None, never 0.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
# RAPL counters start again after some 66 to 262 kJ: a socket that draws a kilowatt takes a minute at the least. One
# that was not looked at for so long that it may have started again twice tells nothing.
READ_EVERY_S = 20.0
MOST_WATTS = 1000.0


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """Joules; None where no counter could be read."""

    cpu_j: float | None = None
    gpu_j: float | None = None

    @property
    def whole_j(self) -> float | None:
        """Return the sum of both; the one that is known, if only one is."""
        known = [value for value in (self.cpu_j, self.gpu_j) if value is not None]
        return sum(known) if known else None


@dataclass(slots=True)
class Counter:
    """A counter of joules that starts again at `range_j`; None: never."""

    read: Callable[[], float]
    range_j: float | None = None
    spent_j: float = 0.0
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.read()

    def poll(self) -> None:
        """Count what came since the last look. Raises OSError when the counter cannot be read any more."""
        now = self.read()
        rise = now - self._last
        self.spent_j += rise if rise >= 0 or self.range_j is None else rise + self.range_j
        self._last = now


class EnergyMeter:
    """Counts from its making on. `poll` it now and then; `read` says what was spent so far."""

    def __init__(
        self, cpu: Sequence[Counter], gpu: Sequence[Counter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cpu, self._gpu, self._clock = cpu, gpu, clock
        self._polled = clock()

    @classmethod
    def of(cls, gpus: Sequence[str]) -> EnergyMeter:
        """The counters of this machine, and of these GPUs, if there are some."""
        return cls(rapl_counters(), nvml_counters(gpus) if gpus else ())

    def poll(self) -> None:
        """Look at the counters if the last look is long ago."""
        if self._clock() - self._polled >= READ_EVERY_S:
            self.read()

    def read(self) -> EnergyUse:
        gap_s, self._polled = self._clock() - self._polled, self._clock()
        self._cpu, cpu = _read(self._cpu, gap_s)
        self._gpu, gpu = _read(self._gpu, gap_s)
        return EnergyUse(cpu, gpu)


def _read(counters: Sequence[Counter], gap_s: float) -> tuple[Sequence[Counter], float | None]:
    """The counters, and their sum, `gap_s` after the last look. One that fails, or has started again unseen, has missed
    something: then nothing is known from there on."""
    if any(counter.range_j is not None and gap_s * MOST_WATTS > counter.range_j for counter in counters):
        return (), None
    try:
        for counter in counters:
            counter.poll()
    except (OSError, ValueError):
        return (), None
    return counters, sum(counter.spent_j for counter in counters) if counters else None


def rapl_counters(folder: Path = POWERCAP) -> list[Counter]:
    """One for each CPU package. None where one of them may not be read: a part of the machine is not the machine."""
    packages = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
    try:
        wanted = [zone for zone in packages if (zone / "name").read_text().startswith("package")]
        return [
            Counter(partial(_microjoules, zone / "energy_uj"), _microjoules(zone / "max_energy_range_uj"))
            for zone in wanted
        ]
    except (OSError, ValueError):
        return []


def _microjoules(path: Path) -> float:
    return int(path.read_text()) / 1e6


def nvml_counters(gpus: Sequence[str]) -> list[Counter]:
    """Return counters of these GPUs, where the package `nvidia-ml-py` is installed and all of them count. Numbers
    would not do as identifiers: CUDA counts GPUs in another order than the driver."""
    if find_spec("pynvml") is None:
        return []
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:  # it is there, but not whole
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(gpu) for gpu in gpus]
        return [Counter(partial(_nvml_joules, nvml, handle)) for handle in handles]
    except (nvml.NVMLError, OSError):
        return []


def _nvml_joules(nvml: Any, handle: Any) -> float:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except nvml.NVMLError as error:
        raise OSError(f"NVML: {error}") from error
