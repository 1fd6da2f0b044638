"""Estimates the range of a run's time, start and loading included."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from batchinfer.engine.schedule.budget import HOST_STEP_S
from batchinfer.machine.cpus import usable_cpus
from batchinfer.plan.forecast.step_times import Basis

# Without measured steps, a CPU is assumed to reach this share of its peaks, plus this time per layer and step. The
# quickstart's steps reached 0.17 (8 rows) to 0.69 (256 rows) of the peaks on two AMD EPYC cores.
CPU_SHARE, CPU_LAYER_S = 0.5, 1e-4
# Factors of the fastest and slowest step time relative to the expected one, by origin
_FACTORS: Mapping[Basis, tuple[float, float]] = MappingProxyType(
    {
        "unknown": (0.0, 0.0),
        "runs": (0.7, 1.5),
        "measured": (0.7, 2.0),
        "declared": (0.5, 2.0),
        "limit": (CPU_SHARE, 2.0),
    }
)
_SHORTEST_ANSWERS = 0.25  # mean share of max_tokens, if no run has measured answer lengths
# Before the first run: seconds to import, plan and publish (7 to 11 for the quickstart), and bytes loaded per second
_FIRST_S = (2.0, 12.0)
_LOAD_BYTES_PER_S = (2e9, 2e8)
_OVERHEAD_FACTORS = (0.7, 1.5)  # relative to earlier runs


@dataclass(frozen=True, slots=True)
class TimeRange:
    """The forecast range of a run's time, as pairs of seconds: the lower and the upper end.

    Attributes:
        engine_s: The time of the engines.
        other_s: The rest of the run: start, reading, loading and publishing.
        runs: Number of earlier runs that measured `other_s`. 0: `other_s` is assumed.
    """

    engine_s: tuple[float, float]
    other_s: tuple[float, float]
    runs: int

    @property
    def run_s(self) -> tuple[float, float]:
        """Return the lower and upper end of the whole run's time in seconds."""
        return self.engine_s[0] + self.other_s[0], self.engine_s[1] + self.other_s[1]


def unmeasured_s(limit_s: float, steps: int, layers: int) -> float:
    """Return the expected seconds of steps on a CPU whose speed was not measured: `limit_s` plus typical overheads.

    Args:
        limit_s: Seconds of all steps at the peaks of the CPU.
        steps: Number of steps.
        layers: Number of layers of the model.
    """
    return limit_s / CPU_SHARE + steps * (HOST_STEP_S + layers * CPU_LAYER_S)


def engine_range(seconds: float, basis: Basis, upper_bound: bool, device: str) -> tuple[float, float]:
    """Return the lower and upper end of the forecast engine time in seconds.

    Args:
        seconds: The expected time.
        basis: Origin of the step times, which determines the width of the range.
        upper_bound: Whether answers were counted at their max_tokens. The lower end then assumes shorter answers.
        device: Device of the engine. On a CPU, a high load by other processes raises the upper end.
    """
    least, most = _FACTORS[basis]
    shorter = _SHORTEST_ANSWERS if upper_bound else 1.0
    return seconds * least * shorter, seconds * most * (_waiting() if device == "cpu" else 1.0)


def _waiting() -> float:
    return max(1.0, os.getloadavg()[0] / usable_cpus())


def other_range(earlier: tuple[float, int] | None, weight_bytes: int, device: str) -> tuple[float, float]:
    """Return the lower and upper end of the seconds that a run spends on start, reading, loading and publishing.

    Args:
        earlier: The median of earlier runs in seconds, and the number of these runs. None before the first run.
        weight_bytes: Bytes of weights to load. Only used before the first run.
        device: Device of the engine. On a CPU, a high load by other processes raises the upper end before the first
            run.
    """
    if earlier is not None:
        return earlier[0] * _OVERHEAD_FACTORS[0], earlier[0] * _OVERHEAD_FACTORS[1]
    fast, slow = (
        first + weight_bytes / pace for first, pace in zip(_FIRST_S, _LOAD_BYTES_PER_S, strict=True)
    )
    return fast, slow * (_waiting() if device == "cpu" else 1.0)
