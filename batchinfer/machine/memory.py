"""Memory of this process and of the machine, and limits on it."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

# psutil is not used: it takes 24 ms to import and does not know the limits of containers
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that are available in the machine, or in this process's container if that is less.

    Args:
        meminfo: The system's file with the available memory.
        cgroup: The folder in which cgroups are mounted.
    """
    return min(_machine(meminfo), _container(cgroup))


def total_memory(cgroup: Path = _CGROUP) -> int:
    """Return the memory of the machine in bytes, or the limit of this process's container if it is lower."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _limit(cgroup))


def peak_memory() -> int:
    """Return the peak resident memory (RSS) of this process in bytes."""
    # On Linux, the ru_maxrss of a child process starts at the peak of its parent; VmHWM does not
    peak = _bytes_in(Path("/proc/self/status"), "VmHWM:")
    if peak is not None:
        return peak
    # ru_maxrss is in kilobytes on Linux, in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_memory() -> int | None:
    """Return the resident memory (RSS) of this process and its child processes in bytes; None without /proc."""
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
    """Return the resident memory (RSS) of this process in bytes; None without /proc."""
    if not Path("/proc/self/statm").exists():
        return None
    return _pages("self") * resource.getpagesize()


def _pages(pid: str) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # the process has just ended
        return 0


def _machine(path: Path) -> int:
    available = _bytes_in(path, "MemAvailable:")
    if available is None:  # macOS has no such file
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return available


def _bytes_in(path: Path, field: str) -> int | None:
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return None


def _container(folder: Path) -> int:
    # Inactive page cache counts as available
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
    limit = _number(folder / "memory.max") or _number(folder / "memory/memory.limit_in_bytes")
    return _UNLIMITED if limit is None else min(limit, _UNLIMITED)


def _number(path: Path) -> int | None:
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
    """Limit the address space of this process to its current size plus `extra` bytes, at most the hard limit.

    Only the soft limit is set, so child processes can lift it with `lift_memory_limit`. It has an effect on Linux only.
    """
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit, hard = pages * resource.getpagesize() + extra, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def lift_memory_limit() -> None:
    """Raise the inherited soft limit on this process's address space to the hard limit, to undo `limit_memory`."""
    if sys.platform != "linux":
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
