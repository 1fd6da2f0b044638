"""How much memory this process has taken, and how much it may still take."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

# Not psutil, which takes 24 ms to import: it knows no limit of a container, and would spare about 15 statements here.
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that are free or can be freed, in the machine or in the container, whichever has less."""
    return min(_machine(meminfo), _container(cgroup))


def total_memory(cgroup: Path = _CGROUP) -> int:
    """Bytes of the machine, or the container's limit where that is smaller."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _limit(cgroup))


def peak_memory() -> int:
    """Most bytes that this process has had in memory so far. Linux counts kilobytes, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int | None:
    """Bytes that this process and those that it started have in memory now; None where no /proc says so."""
    own = own_resident_memory()
    if own is None:
        return None
    pages = [own // resource.getpagesize()]
    for children in Path("/proc/self/task").glob("*/children"):
        try:
            pages += [_pages(pid) for pid in children.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
            continue
    return sum(pages) * resource.getpagesize()


def own_resident_memory() -> int | None:
    """Bytes that this process alone has in memory now; None where no /proc says so."""
    if not Path("/proc/self/statm").exists():
        return None
    return _pages("self") * resource.getpagesize()


def _pages(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


def _machine(path: Path) -> int:
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # macOS has no such file


def _container(folder: Path) -> int:
    """Return the memory that the cgroup's limit leaves. Cached files count as used."""
    limit = _limit(folder)
    if limit == _UNLIMITED:
        return _UNLIMITED
    for used, statistics in _USED:
        taken = _number(folder / used)
        if taken is not None:
            return max(0, limit - taken + _file_pages(folder / statistics))
    return limit


_USED = (
    ("memory.current", "memory.stat"),  # cgroup v2
    ("memory/memory.usage_in_bytes", "memory/memory.stat"),  # cgroup v1
)


def _limit(folder: Path) -> int:
    """Return the memory that a container may use, by cgroup v2 or v1."""
    limit = _number(folder / "memory.max") or _number(folder / "memory/memory.limit_in_bytes")
    return _UNLIMITED if limit is None else min(limit, _UNLIMITED)


def _number(path: Path) -> int | None:
    """None for a file that is not there, and for `max`: no limit."""
    text = path.read_text().strip() if path.exists() else "max"
    return None if text == "max" else int(text)


def _file_pages(path: Path) -> int:
    names = ("inactive_file", "total_inactive_file")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(" ")
        if name in names:
            return int(value)
    return 0


def limit_memory(extra: int) -> None:
    """Limit this process to that many bytes more than it has, or less if it is limited already. A process that it
    starts may lift this limit."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit, hard = pages * resource.getpagesize() + extra, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def lift_memory_limit() -> None:
    """Take back the limit of the process that started this one."""
    if sys.platform != "linux":
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
