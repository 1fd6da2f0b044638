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

from batchinfer.bench.gpu_suite.section import NoTimeLeft, Section, Setting

# GPUs compile for seconds what they then run for microseconds, and do so on all cores
PROCESSES = 8
FOLDER, ENGINE = "tests/kernels/gpu", "tests/batchinfer/engine"
REHEARSED = ("test_gated_activation.py", "test_merge_state.py")
LEFT_TO_READ_S = 3.0


class TestsFailed(Exception):
    """Some did; the message has pytest's last lines."""


def run(section: Section) -> None:
    """One result: how many passed, failed and were skipped. Raises TestsFailed, NoTimeLeft."""
    with tempfile.TemporaryDirectory(prefix="batchinfer-gpu-tests-") as folder:
        junit = Path(folder) / "junit.xml"
        code, text = _pytest(section, junit)
        counts = _counts(junit)
        section.result({"kind": "tests", **counts})
    if code != 0:
        raise TestsFailed(f"pytest ended with code {code}\n{text[-4000:]}")


def selected(setting: Setting) -> list[str]:
    """What is given to pytest."""
    root = Path(setting.root)
    if setting.rehearsal:
        return [f"{FOLDER}/{name}" for name in REHEARSED]
    engine = sorted(str(path.relative_to(root)) for path in (root / ENGINE).glob("test_triton*.py"))
    return [FOLDER, *engine, "--ignore-glob=*aot*"]


def _pytest(section: Section, junit: Path) -> tuple[int, str]:
    several = importlib.util.find_spec("xdist") is not None and not section.setting.rehearsal
    command = [sys.executable, "-m", "pytest", *selected(section.setting), "-m", "not slow", "--tb=short"]
    command += [f"--junitxml={junit}", *(["-n", str(PROCESSES)] if several else [])]
    # The interpreter is what the tests themselves switch on where there is no GPU
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with subprocess.Popen(
        command,
        cwd=section.setting.root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=max(1.0, section.left_s - LEFT_TO_READ_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it started
            text, _ = process.communicate()
            raise NoTimeLeft(f"the tests did not end: {text[-500:]}") from None
    return process.returncode, text


def _counts(junit: Path) -> dict[str, Any]:
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
