"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Cores by affinity (taskset, cpusets); fewer where a quota (`docker --cpus`, systemd's CPUQuota) allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cpus for cpus in _quotas(root, membership) if cpus is not None]
    return max(1, min(cores, *quotas) if quotas else cores)


def _quotas(root: Path, membership: Path) -> Iterator[int | None]:
    """Of this process's control group and of all above it, since each of them bounds what is below."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup v2
            yield from (_quota_v2(folder / "cpu.max") for folder in _upwards(root, path))
        elif "cpu" in controllers.split(","):
            yield from (_quota_v1(folder) for folder in _upwards(root / controllers, path))
            yield from (_quota_v1(folder) for folder in _upwards(root / "cpu", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group's folder, and those above it; in a container the path may name folders that only the host sees."""
    inside = Path(path.lstrip("/"))
    yield from (root / folder for folder in (inside, *inside.parents))


def _quota_v2(path: Path) -> int | None:
    """The file holds `microseconds period`, or `max period` without a limit."""
    if not path.exists():
        return None
    allowed, _, period = path.read_text().partition(" ")
    return None if allowed == "max" else math.ceil(int(allowed) / int(period))


def _quota_v1(folder: Path) -> int | None:
    """-1 stands for no limit."""
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not quota.exists() or not period.exists():
        return None
    allowed = int(quota.read_text())
    return None if allowed <= 0 else math.ceil(allowed / int(period.read_text()))
