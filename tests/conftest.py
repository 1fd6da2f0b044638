"""Limits every test to its share of two cores, and sets up Triton."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

# Before torch and OpenMP are imported: two test processes run in parallel, and threads of tiny operators cost
# ten times their gain.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads sleep while they wait: a spinning thread would block the core for the thread that it waits for. Some
# steps of tiny models took ten times the time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import HealthCheck, settings

from tests.cpu_seconds import NAME, RECORD, cpu_s, lines, record
from tests.examples import SEED, everything, examples, sampled, seed
from tests.kernels.gpu import interpreter
from tests.parts import leave_part

# Collecting tests makes a million objects that all stay: looking for garbage among them takes a sixth of that time.
gc.disable()

# Hundreds of tests start the package in a new process. If the environment disables bytecode files, each would
# compile all modules, a fifth of its time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before our modules import it: each job reads a dozen versions, and each call parses the metadata again.
importlib.metadata.version = cache(importlib.metadata.version)

# Tests write thousands of small files. In memory, a job takes 20 % less CPU time and never waits for a disk.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# A slow example only means that the machine is busy: no property has a limit of milliseconds.
settings.register_profile(
    "patient", max_examples=examples(15, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Files with long tests. Started last, they would leave one of two test processes idle.
LONG = (
    "test_gpu_suite.py",
    "test_captured_stages_job.py",
    "test_captured_ranks_job.py",
    "test_drafted_graphs.py",
    "test_kills.py",
)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long tests first, drop other parts, and thin sweeps."""
    items.sort(key=lambda item: item.path.name not in LONG)
    leave_part(items)
    sampled(items)


def pytest_collection_finish() -> None:
    """Restrict garbage collection to objects of tests from here on."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Record the CPU time of each test."""
    before = cpu_s()
    try:
        yield
    finally:
        item.user_properties.append((NAME, cpu_s() - before))


def pytest_unconfigure() -> None:
    """Remove shared models, and restore garbage collection for the end of Python."""
    gc.unfreeze()
    if "tests.checkpoints" in sys.modules:
        sys.modules["tests.checkpoints"].remove_kept()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the CPU time, record durations, and print how to run the remaining cases."""
    reports = [one for of in ("", "passed", "failed", "error") for one in terminalreporter.stats.get(of, [])]
    if path := os.environ.get(RECORD):
        record(reports, Path(path))
    for line in lines(reports):
        terminalreporter.write_line(line)
    if not everything():
        terminalreporter.write_line(
            f"Of sweeps, sample {seed()!r}; {SEED}=… draws another, and make test-all runs every case."
        )


# Before triton is imported anywhere (transformers and torch do so here and there): its own functions and ours are
# interpreted or compiled by what holds when their modules are imported. A quarter of a second for each process.
if interpreter.is_wanted():
    interpreter.switch_on()
