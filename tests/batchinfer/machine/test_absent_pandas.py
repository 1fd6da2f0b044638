"""The command and its processes start without pandas. Programs that import batchinfer keep it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.batchinfer.wrong_jobs import Place

ROOT = Path(__file__).parents[3]

SCRIPT = """
import importlib.metadata, importlib.util, sys
from batchinfer.machine.absent_pandas import leave_pandas_out
leave_pandas_out()
assert importlib.util.find_spec("pandas") is None
assert importlib.util.find_spec("numpy") is not None
importlib.metadata.version("pandas")
import pyarrow as pa
assert pa.array(["a", None]).to_pylist() == ["a", None]
assert pa.scalar("a").as_py() == "a"
assert not any(name.split(".")[0] == "pandas" for name in sys.modules)
try:
    pa.table({"a": [1]}).to_pandas()
except ImportError as error:
    print(error)
"""


def test_it_is_as_if_pandas_were_not_installed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "No module named 'pandas'\n"), done.stderr


@pytest.mark.slow
def test_no_process_of_a_run_imports_pandas(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "batchinfer", "run", "job.yaml"],
        cwd=place.folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert imported >= {"pyarrow.lib", "torch", "batchinfer.engine.loop.engine"}
    assert not any(name.startswith("pandas.") for name in imported)
