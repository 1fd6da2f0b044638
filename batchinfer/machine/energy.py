"""Reads the energy counters of the machine's CPUs (RAPL) and GPUs (NVML).

Counters include all other programs, and idle power. If a counter is missing or not readable (on Linux, only root can
read RAPL), the energy is unknown: None, never 0.
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
# RAPL counters overflow after 66 to 262 kJ, that is after at least a minute at MAX_WATTS. They are read more often,
# because a counter that may have overflowed twice is useless
READ_EVERY_S = 20.0
MAX_WATTS = 1000.0  # of a CPU package


@dataclass(frozen=True, slots=True)
class EnergyUse:
    """The energy that a machine used in an interval. None means that a counter cannot be read.

    Args:
        cpu_j: Joules of the CPUs.
        gpu_j: Joules of the GPUs.
    """

    cpu_j: float | None = None
    gpu_j: float | None = None

    @property
    def total_j(self) -> float | None:
        """Return the joules of CPUs and GPUs together. An unknown value is left out; None if both are unknown."""
        known = [value for value in (self.cpu_j, self.gpu_j) if value is not None]
        return sum(known) if known else None


@dataclass(slots=True)
class Counter:
    """Adds up the energy that a hardware counter measures. It handles overflows of the hardware counter.

    Args:
        read: Returns the value of the hardware counter in joules.
        range_j: The value at which the hardware counter overflows to 0. None: it never overflows.
        spent_j: The joules since this object was created, up to the last `poll`.
    """

    read: Callable[[], float]
    range_j: float | None = None
    spent_j: float = 0.0
    _last: float = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.read()

    def poll(self) -> None:
        """Add the energy since the last call to `spent_j`. Raises OSError if the hardware counter cannot be read."""
        now = self.read()
        rise = now - self._last
        self.spent_j += rise if rise >= 0 or self.range_j is None else rise + self.range_j
        self._last = now


class EnergyMeter:
    """Measures the energy of this machine since its creation. Call `poll` at least every minute to notice overflows."""

    def __init__(
        self, cpu: Sequence[Counter], gpu: Sequence[Counter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to measure.

        Args:
            cpu: The counters of all CPUs; empty if they cannot be read.
            gpu: The counters of all GPUs; empty if they cannot be read.
            clock: Returns the time in seconds.
        """
        self._cpu, self._gpu, self._clock = cpu, gpu, clock
        self._polled = clock()

    @classmethod
    def of(cls, gpus: Sequence[str]) -> EnergyMeter:
        """Create a meter of this machine's CPUs, and of its GPUs with these UUIDs."""
        return cls(rapl_counters(), nvml_counters(gpus) if gpus else ())

    def poll(self) -> None:
        """Read the hardware counters, unless they were read less than READ_EVERY_S seconds ago."""
        if self._clock() - self._polled >= READ_EVERY_S:
            self.read()

    def read(self) -> EnergyUse:
        """Read the hardware counters, and return the energy used since the meter was created."""
        gap_s, self._polled = self._clock() - self._polled, self._clock()
        self._cpu, cpu = _read(self._cpu, gap_s)
        self._gpu, gpu = _read(self._gpu, gap_s)
        return EnergyUse(cpu, gpu)


def _read(counters: Sequence[Counter], gap_s: float) -> tuple[Sequence[Counter], float | None]:
    # If a counter fails, or may have overflowed twice, the energy is unknown from then on
    if any(counter.range_j is not None and gap_s * MAX_WATTS > counter.range_j for counter in counters):
        return (), None
    try:
        for counter in counters:
            counter.poll()
    except (OSError, ValueError):
        return (), None
    return counters, sum(counter.spent_j for counter in counters) if counters else None


def rapl_counters(folder: Path = POWERCAP) -> list[Counter]:
    """Return an energy counter (RAPL) for each CPU package of this machine; [] if any counter cannot be read."""
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
    """Return an energy counter (NVML) for each GPU; [] if a GPU has none, or `nvidia-ml-py` is not installed.

    Args:
        gpus: UUIDs of GPUs. Numbers would be ambiguous, because CUDA and the driver order GPUs differently.
    """
    if find_spec("pynvml") is None:
        return []
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:  # the installation is broken
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
