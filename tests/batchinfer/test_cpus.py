"""The number of threads follows what a container allows, not what the machine has."""

from __future__ import annotations

import os

import pytest

from batchinfer.cpus import usable_cpus


@pytest.mark.parametrize(
    ("text", "wanted"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_quota_bounds_the_cores(tmp_path, text, wanted):
    (tmp_path / "cpu.max").write_text(text + "\n")
    cores = len(os.sched_getaffinity(0))
    assert usable_cpus(tmp_path / "cpu.max") == min(cores, wanted or cores)
    assert usable_cpus(tmp_path / "missing") == cores
