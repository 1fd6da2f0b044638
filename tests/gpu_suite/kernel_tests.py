"""Runs the tests of GPU kernels on the GPU: wrong kernels are not worth timing.

Tests that compile for other GPUs are skipped, as they need no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

from batchinfer.machine.cpus import usable_cpus
from tests.suite.run import ROOT
from tests.suite.section import BenchSection, Part, Result

# Kernels compile for seconds and run for microseconds: use all cores
MOST_PROCESSES = 12
# All files that use a GPU, as in `make test-gpu`
TESTS = (
    "tests/kernels/gpu",
    "tests/batchinfer/models/ops/test_triton_ops.py",
    "tests/batchinfer/models/ops/test_experts.py",
    "tests/batchinfer/engine/test_triton_engine.py",
    "tests/batchinfer/engine/test_stored_fp8.py",
    "tests/batchinfer/engine/test_stored_integers.py",
    "tests/batchinfer/engine/test_stored_mxfp4.py",
    "tests/batchinfer/engine/test_adapters.py",
    "tests/batchinfer/engine/test_calibrating_gpu.py",
    "tests/batchinfer/engine/test_trees_on_gpu.py",
)
REHEARSED = "tests/kernels/test_cost.py"
TO_SUM_UP_S = 10.0  # for pytest to write its report after an interrupt


class TestsFailed(Exception):
    """Tests failed or did not end. The message has pytest's last lines."""


def parts(section: BenchSection) -> list[Part]:
    """Return the one part."""
    return [("pytest", partial(_tested, section))]


def _tested(section: BenchSection) -> Result:
    """Run the tests, and return the numbers of passed, failed and skipped ones."""
    junit = section.place / "junit.xml"
    code, text = _pytest(section, junit)
    if code != 0:
        ended = "did not end" if code is None else f"ended with code {code}"
        section.failed("pytest", TestsFailed(f"pytest {ended}\n{text[-4000:]}"))
    return Result("tests", counts(junit))


def selected(rehearsal: bool) -> list[str]:
    """Return pytest's arguments."""
    if rehearsal:
        return [REHEARSED]
    # A file that cannot be imported is reported as an error, and the others run
    chosen = [*TESTS, "--ignore-glob=*aot*", "-k", "not compiles", "--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is None:
        return chosen
    # pytest-benchmark warns under xdist, and warnings are errors
    return [*chosen, "-n", str(min(MOST_PROCESSES, usable_cpus())), "-p", "no:benchmark"]


def _pytest(section: BenchSection, junit: Path) -> tuple[int | None, str]:
    """Return pytest's exit code, or None if it was interrupted, and its output."""
    command = [sys.executable, "-m", "pytest", *selected(section.rehearsal), "-m", "not slow", "--tb=short"]
    command += [f"--junitxml={junit}"]
    # Tests enable the interpreter themselves if there is no GPU
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as process:
        try:
            text, _ = process.communicate(timeout=max(1.0, section.left_s - TO_SUM_UP_S))
        except subprocess.TimeoutExpired:
            return None, _interrupted(process)
    return process.returncode, text


def _interrupted(process: subprocess.Popen[str]) -> str:
    """Stop pytest and return its output."""
    process.send_signal(signal.SIGINT)
    try:
        text, _ = process.communicate(timeout=TO_SUM_UP_S * 0.8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # kill pytest and its child processes
        text, _ = process.communicate()
    return text


def counts(junit: Path) -> dict[str, Any]:
    """Return counts from pytest's report, or zeros without a report."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase")) if junit.exists() else []
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    found = {"passed": len(cases) - len(failed) - skipped, "failed": len(failed), "skipped": skipped}
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return found | ({"failed_tests": ", ".join(names)} if failed else {})
