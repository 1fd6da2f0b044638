"""Determines the CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

# psutil is not used: it takes 24 ms to import, and knows neither cgroup quotas nor the topology of cores
_ROOT = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Return the number of CPU cores that this process may use: the lower of its affinity and its cgroup quota.

    `docker --cpus` sets such a quota.

    Args:
        root: The folder in which cgroups are mounted.
        membership: The file that names the cgroups of this process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cpus for cpus in _quotas(root, membership) if cpus is not None]
    return max(1, min(cores, *quotas) if quotas else cores)


def split_cores(parts: int, nodes: Path = _NODES, topology: Path = _TOPOLOGY) -> list[tuple[int, ...]]:
    """Divide the CPU cores that this process may use into parts whose sizes differ by at most one.

    Cores of a NUMA node, and hyper-threads of a physical core, are in the same part or in neighbouring parts.

    Args:
        parts: The number of parts.
        nodes: The system's folder with the NUMA nodes.
        topology: The system's folder with the topology of cores.

    Returns:
        The numbers of the cores of each part. All parts are empty on a system without CPU affinity, such as macOS.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [()] * parts
    usable = sorted(os.sched_getaffinity(0))
    lists = enumerate(sorted(nodes.glob("node*/cpulist"), key=_number))
    node = {core: number for number, path in lists for core in _cores(path)}
    siblings = {core: _cores(topology / f"cpu{core}/topology/thread_siblings_list") for core in usable}
    physical = {core: min(found, default=core) for core, found in siblings.items()}
    usable.sort(key=lambda core: (node.get(core, 0), physical[core], core))
    ends = [len(usable) * part // parts for part in range(parts + 1)]
    return [tuple(usable[start:end]) for start, end in pairwise(ends)]


def _number(path: Path) -> int:
    return int(path.parent.name.removeprefix("node"))


def _cores(path: Path) -> list[int]:
    parts = path.read_text().strip().split(",") if path.exists() else []
    ranges = [part.partition("-") for part in parts if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def _quotas(root: Path, membership: Path) -> Iterator[int | None]:
    # Quotas of ancestors apply, too
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup v2
            yield from (_quota_v2(folder / "cpu.max") for folder in _upwards(root, path))
        elif "cpu" in controllers.split(","):
            yield from (_quota_v1(folder) for folder in _upwards(root / controllers, path))
            yield from (_quota_v1(folder) for folder in _upwards(root / "cpu", path))


def _upwards(root: Path, path: str) -> Iterator[Path]:
    # In a container, some of the folders may exist only on the host
    inside = Path(path.lstrip("/"))
    yield from (root / folder for folder in (inside, *inside.parents))


def _quota_v2(path: Path) -> int | None:
    if not path.exists():
        return None
    allowed, _, period = path.read_text().partition(" ")  # microseconds; "max" for no limit
    return None if allowed == "max" else math.ceil(int(allowed) / int(period))


def _quota_v1(folder: Path) -> int | None:
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    if not quota.exists() or not period.exists():
        return None
    allowed = int(quota.read_text())  # -1: no limit
    return None if allowed <= 0 else math.ceil(allowed / int(period.read_text()))
