"""Limits that are too low are reported before a library ends the process silently."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.core.errors import OutOfMemory, Unavailable, classify_error
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.limits import (
    DATA_MIB,
    PROCESSES,
    PROCESSES_OF_A_CORE,
    SPACE_MIB,
    SPACE_OF_A_CORE_MIB,
    check_limits,
)
from batchinfer.pipeline.workers.endings import failure
from tests.batchinfer.wrong_jobs import Place, environment
from tests.patience import PATIENCE_S

CORES = usable_cpus()
NEEDED_MIB = SPACE_MIB + SPACE_OF_A_CORE_MIB * CORES
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere there is no such limit")
NEEDED = PROCESSES + PROCESSES_OF_A_CORE * CORES


def ended(place: Place, limit: str, *before: str) -> tuple[int, str]:
    """Run under a `ulimit`; return the exit code and the output."""
    command = [*before, *limited(limit), "-m", "batchinfer", "run", "job.yaml", "--quiet"]
    done = subprocess.run(
        command, cwd=place.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    return done.returncode, done.stderr


def limited(limit: str) -> list[str]:
    """Return a Python command under a limit."""
    return ["bash", "-c", f'ulimit {limit} && exec "$@"', "-", sys.executable]


@on_linux
@pytest.mark.parametrize("mib", [200, pytest.param(NEEDED_MIB - 1, marks=pytest.mark.slow)])
def test_too_little_address_space_is_reported(place: Place, mib: int) -> None:
    code, told = ended(place, f"-v {mib * 1024}")
    assert (code, len(told.splitlines())) == (71, 1)
    assert f"{mib:,} MiB of address space (RLIMIT_AS; `ulimit -v`" in told
    assert f"needs {NEEDED_MIB:,} MiB" in told


@on_linux
def test_too_little_memory_for_data_is_refused(place: Place) -> None:
    """The engine's process once died of SIGSEGV under this limit."""
    code, told = ended(place, "-d 409600")
    assert (code, len(told.splitlines())) == (71, 1)
    assert "400 MiB of memory for data (RLIMIT_DATA; `ulimit -d`" in told
    assert f"needs {DATA_MIB + SPACE_OF_A_CORE_MIB * CORES:,} MiB" in told


@on_linux
def test_the_library_checks_limits_before_it_imports_others() -> None:
    code = "import batchinfer\ntry:\n    batchinfer.run\nexcept Exception as error:\n    print(error.exit_code, error)"
    command = [*limited("-v 409600"), "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stdout.startswith("71 a process may have 400 MiB of address space"), done.stderr


@pytest.mark.slow
@on_linux
def test_the_required_address_space_is_sufficient(place: Place) -> None:
    assert ended(place, f"-v {NEEDED_MIB * 1024}") == (0, "")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="root lends its rights to a user without processes",
)
def test_too_few_processes_are_reported(place: Place) -> None:
    rights = "+dac_override,+fowner"
    caps = (f"--{kind}-caps={rights}" for kind in ("inh", "ambient"))
    another = ("setpriv", "--reuid=54321", "--clear-groups", *caps)
    code, told = ended(place, "-u 10", *another)
    assert (code, len(told.splitlines())) == (69, 1)
    assert f"9 more processes and threads may be started, but batchinfer needs {NEEDED} on" in told
    assert "raise the limit" in told


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    proc, above = tmp_path / "proc", tmp_path / "groups" / "box"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/box/job\n")
    (above / "job").mkdir(parents=True)
    for folder, most in ((above / "job", "max"), (above, "100")):
        (folder / "pids.max").write_text(f"{most}\n")
        (folder / "pids.current").write_text(f"{100 - NEEDED}\n")
    check_limits(tmp_path / "groups", proc)
    (above / "pids.current").write_text(f"{101 - NEEDED}\n")
    with pytest.raises(Unavailable, match=f"{NEEDED - 1} more processes and threads may be started"):
        check_limits(tmp_path / "groups", proc)


@pytest.mark.parametrize("error", [
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    RuntimeError("can't start new thread"),
    RuntimeError("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"),
])  # fmt: skip
def test_a_limit_reached_during_a_job_is_reported(error: Exception) -> None:
    meant = classify_error(error)
    assert isinstance(meant, Unavailable)
    assert "raise the limit on processes and threads" in str(meant)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("std::bad_alloc"),
        ImportError("libarrow.so.2600: failed to map segment from shared object"),
        caused(ValueError("the file cannot be read"), MemoryError()),
    ],
    ids=repr,
)
def test_memory_that_runs_out_is_no_bug(error: Exception) -> None:
    meant = classify_error(error)
    assert isinstance(meant, OutOfMemory)
    assert "lower engine.kv_memory, raise the limit of the process" in str(meant)
    assert failure(error).exit_code == 71


def test_an_error_without_memory_in_it_stays_a_bug() -> None:
    assert classify_error(caused(RuntimeError("shapes differ"), KeyError("x"))).exit_code == 70
