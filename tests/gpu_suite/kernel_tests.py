"""The tests of the GPU kernels, on the GPU: nothing is worth timing that is wrong.

Without those that compile for other GPUs, which are as good on a machine that has none.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchinfer.machine.cpus import usable_cpus
from tests.gpu_suite.section import NoTimeLeft, Section, Setting

# Kernels compile for seconds and then run for microseconds, so that all cores are of use
MOST_PROCESSES = 12
# All that run on a GPU where there is one, as in `make test-gpu`
TESTS = (
    "tests/kernels/gpu",
    "tests/batchinfer/models/ops/test_triton_ops.py",
    "tests/batchinfer/models/ops/test_experts.py",
    "tests/batchinfer/engine/test_triton_engine.py",
    "tests/batchinfer/engine/test_stored_fp8.py",
)
REHEARSED = "tests/kernels/gpu/test_merge_state.py"
TO_SUM_UP_S = 10.0  # for pytest to write what came of it when it is interrupted


class TestsFailed(Exception):
    """Some did; the message has pytest's last lines."""


def run(section: Section) -> None:
    """One result: how many passed, failed and were skipped. Raises TestsFailed, NoTimeLeft."""
    with tempfile.TemporaryDirectory(prefix="batchinfer-gpu-tests-") as folder:
        junit = Path(folder) / "junit.xml"
        code, text = _pytest(section, junit)
        found = counts(junit)
        section.result({"kind": "tests", **found})
    if code is None and not found["failed"]:
        raise NoTimeLeft("the tests did not end")
    if code != 0:
        raise TestsFailed(f"pytest ended with code {code}\n{text[-4000:]}")


def selected(setting: Setting) -> list[str]:
    """What is given to pytest."""
    if setting.rehearsal:
        return [REHEARSED]
    # A file that cannot be imported here is told as an error, and the others run
    return [*TESTS, "--ignore-glob=*aot*", "-k", "not compiles", "--continue-on-collection-errors"]


def _pytest(section: Section, junit: Path) -> tuple[int | None, str]:
    """Its exit code, None where it was interrupted, and what it said."""
    command = [sys.executable, "-m", "pytest", *selected(section.setting), "-m", "not slow", "--tb=short"]
    command += [f"--junitxml={junit}", *_several(section.setting)]
    # The interpreter is what the tests themselves switch on where there is no GPU
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, cwd=section.setting.root, env=environment, start_new_session=True, **pipes
    ) as process:
        try:
            text, _ = process.communicate(timeout=max(1.0, section.left_s - TO_SUM_UP_S))
        except subprocess.TimeoutExpired:
            return None, _interrupted(process)
    return process.returncode, text


def _several(setting: Setting) -> list[str]:
    if setting.rehearsal or importlib.util.find_spec("xdist") is None:
        return []
    # pytest-benchmark, where a machine has it, warns that it does nothing beside xdist, and a warning is an error
    return ["-n", str(min(MOST_PROCESSES, usable_cpus())), "-p", "no:benchmark"]


def _interrupted(process: subprocess.Popen[str]) -> str:
    """What pytest says when it has to stop, or what it had said when it did not."""
    process.send_signal(signal.SIGINT)
    try:
        text, _ = process.communicate(timeout=TO_SUM_UP_S * 0.8)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
        text, _ = process.communicate()
    return text


def counts(junit: Path) -> dict[str, Any]:
    """From what pytest wrote; zeros where it wrote nothing."""
    if not junit.exists():
        return {"passed": 0, "failed": 0, "skipped": 0, "failed_tests": []}
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = [case for case in cases if _has(case, ("failure", "error"))]
    skipped = [case for case in cases if _has(case, ("skipped",))]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failed_tests": list(_names(failed)),
    }


def _has(case: ElementTree.Element, kinds: tuple[str, ...]) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def _names(cases: list[ElementTree.Element]) -> Iterator[str]:
    yield from (f"{case.get('classname')}::{case.get('name')}" for case in cases)
