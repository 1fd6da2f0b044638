"""Limits of the system on a process: too low ones are refused before libraries end the process without a message."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.errors import TOO_FEW_PROCESSES, OutOfMemory, Unavailable
from batchinfer.machine.cpus import usable_cpus

_MIB = 1 << 20
# Of address space, for each process of ours. A job of twenty rows and a model of 100 kB took 2,560 MiB on 2 cores, most
# of it for threads and never touched; with 2,150 MiB DuckDB found no memory, with 1,950 MiB it ended by SIGSEGV.
SPACE_MIB, SPACE_OF_A_CORE_MIB = 2400, 80
# Of memory for data, which includes the stacks of threads: the same job took 781 MiB on 2 cores; with 683 MiB OpenMP
# could not start its threads, with 400 MiB the process ended by SIGSEGV.
DATA_MIB = 700
# Processes and threads. The same job needed 18 on 2 cores and had 28 at most; libraries start some for each core.
PROCESSES, PROCESSES_OF_A_CORE = 16, 6
_MANY = 4096  # a limit that is higher leaves enough


def check_limits(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
    """Raises OutOfMemory, Unavailable where a limit leaves too little for any work."""
    cores = usable_cpus()
    _check_space(resource.RLIMIT_AS, "address space (RLIMIT_AS; `ulimit -v`", SPACE_MIB, cores)
    if sys.platform.startswith(
        "linux"
    ):  # elsewhere this limit covers little of the memory that a process maps
        _check_space(resource.RLIMIT_DATA, "memory for data (RLIMIT_DATA; `ulimit -d`", DATA_MIB, cores)
    left, least = _processes_left(root, proc), PROCESSES + PROCESSES_OF_A_CORE * cores
    if left is not None and left < least:
        raise Unavailable(
            f"{max(0, left)} more processes and threads may be started, and batchinfer needs {least} on {cores} cores; "
            f"{TOO_FEW_PROCESSES}"
        )


def _check_space(limit: int, what: str, mib: int, cores: int) -> None:
    """Raises OutOfMemory if a limit of the process is below `mib` MiB and its part for each core."""
    allowed, needed = resource.getrlimit(limit)[0], (mib + SPACE_OF_A_CORE_MIB * cores) * _MIB
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise OutOfMemory(
            f"a process may have {allowed // _MIB:,} MiB of {what} shows it in KiB), and batchinfer needs "
            f"{needed // _MIB:,} MiB on {cores} cores, plus the model: raise it"
        )


def _processes_left(root: Path, proc: Path) -> int | None:
    """How many processes and threads may still be started; None: many."""
    if not sys.platform.startswith("linux"):
        return None
    found = [limit - used for limit, used in _groups(root, proc / "self/cgroup")]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and 0 <= limit < _MANY:  # root's are not counted
        found.append(limit - _of_this_user(proc))
    return min(found, default=None)


def _groups(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of this process's control group, and of each above it."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            group = (root / "pids" if controllers else root) / folder
            limit, used = group / "pids.max", group / "pids.current"
            if limit.exists() and used.exists() and (most := limit.read_text().strip()) != "max":
                yield int(most), int(used.read_text())


def _of_this_user(proc: Path) -> int:
    """Processes and threads that run now."""
    user, count = os.getuid(), 0
    for folder in proc.glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                count += len(os.listdir(folder / "task"))
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return count
