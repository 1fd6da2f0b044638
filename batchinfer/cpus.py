"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cpus(quota: Path = _QUOTA) -> int:
    """Cores by affinity (taskset, cpusets), or by the container's quota (`docker --cpus`) where that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota_cpus(quota) or cores))


def _quota_cpus(path: Path) -> int | None:
    """cgroup v2 writes `microseconds period`, or `max period` without a limit."""
    if not path.exists():
        return None
    allowed, _, period = path.read_text().partition(" ")
    return None if allowed == "max" else math.ceil(int(allowed) / int(period))
