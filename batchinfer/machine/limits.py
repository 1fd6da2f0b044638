"""Checks the system's limits on a process, because libraries may crash without a message if a limit is too low."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.errors import TOO_FEW_PROCESSES, OutOfMemory, Unavailable
from batchinfer.machine.cpus import usable_cpus

_MIB = 1 << 20
# Address space per process. A job with 20 rows and a model of 100 kB used 2,560 MiB on 2 cores, most of it reserved for
# threads. With 2,150 MiB DuckDB ran out of memory; with 1,950 MiB the process crashed (SIGSEGV)
SPACE_MIB, SPACE_OF_A_CORE_MIB = 2400, 80
# Memory for data, including thread stacks. The same job used 781 MiB on 2 cores. With 683 MiB OpenMP could not start
# its threads; with 400 MiB the process crashed (SIGSEGV)
DATA_MIB = 700
# Processes and threads. The same job had at most 28 on 2 cores and needed 18; libraries start some per core
PROCESSES, PROCESSES_OF_A_CORE = 16, 6
_MANY = 4096  # higher limits on processes are not checked


def check_limits(root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
    """Check that the system's limits on this process suffice for a small job.

    Args:
        root: The folder in which cgroups are mounted.
        proc: The folder of process information.

    Raises:
        OutOfMemory: The limit on address space or data is too low.
        Unavailable: The limit on processes and threads is too low.
    """
    cores = usable_cpus()
    _check_space(resource.RLIMIT_AS, "address space (RLIMIT_AS; `ulimit -v`", SPACE_MIB, cores)
    # On other systems, RLIMIT_DATA does not include mapped memory
    if sys.platform.startswith("linux"):
        _check_space(resource.RLIMIT_DATA, "memory for data (RLIMIT_DATA; `ulimit -d`", DATA_MIB, cores)
    left, least = _processes_left(root, proc), PROCESSES + PROCESSES_OF_A_CORE * cores
    if left is not None and left < least:
        raise Unavailable(
            f"{max(0, left)} more processes and threads may be started, but batchinfer needs {least} on {cores} cores; "
            f"{TOO_FEW_PROCESSES}"
        )


def _check_space(limit: int, what: str, mib: int, cores: int) -> None:
    allowed, needed = resource.getrlimit(limit)[0], (mib + SPACE_OF_A_CORE_MIB * cores) * _MIB
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise OutOfMemory(
            f"a process may have {allowed // _MIB:,} MiB of {what} shows it in KiB), but batchinfer needs "
            f"{needed // _MIB:,} MiB on {cores} cores, plus the model: raise the limit"
        )


def _processes_left(root: Path, proc: Path) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    found = [limit - used for limit, used in _groups(root, proc / "self/cgroup")]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() != 0 and 0 <= limit < _MANY:  # the limit does not apply to root
        found.append(limit - _of_this_user(proc))
    return min(found, default=None)


def _groups(root: Path, membership: Path) -> Iterator[tuple[int, int]]:
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
    user, count = os.getuid(), 0
    for folder in proc.glob("[0-9]*"):
        try:
            if folder.stat().st_uid == user:
                count += len(os.listdir(folder / "task"))
        except (FileNotFoundError, ProcessLookupError):  # the process has just ended
            continue
    return count
