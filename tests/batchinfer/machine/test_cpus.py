"""The number of threads follows the limits of a container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchinfer.machine.cpus import split_cores, usable_cpus

CORES = len(os.sched_getaffinity(0))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path


@pytest.mark.parametrize(("text", "wanted"), [("150000 100000", 2), ("5000 10000", 1), ("max 100000", None)])
@pytest.mark.parametrize("folder", ["", "system.slice", "system.slice/nightly.service"])
def test_a_quota_bounds_the_cores(tmp_path: Path, folder: str, text: str, wanted: int | None) -> None:
    """systemd sets CPUQuota on the service's group, a container runtime on the root of its view."""
    membership = written(tmp_path / "cgroup", "0::/system.slice/nightly.service")
    written(tmp_path / "fs" / folder / "cpu.max", text)
    assert usable_cpus(tmp_path / "fs", membership) == min(CORES, wanted or CORES)


@pytest.mark.parametrize(("quota", "wanted"), [("150000", 2), ("50000", 1), ("-1", None)])
@pytest.mark.parametrize("mounted", ["cpu,cpuacct", "cpu"])
def test_older_quotas_bound_the_cores(tmp_path: Path, mounted: str, quota: str, wanted: int | None) -> None:
    membership = written(tmp_path / "cgroup", "5:memory:/job\n4:cpu,cpuacct:/job")
    written(tmp_path / "fs" / mounted / "job" / "cpu.cfs_quota_us", quota)
    written(tmp_path / "fs" / mounted / "job" / "cpu.cfs_period_us", "100000")
    assert usable_cpus(tmp_path / "fs", membership) == min(CORES, wanted or CORES)
    assert usable_cpus(tmp_path, tmp_path / "missing") == CORES


def test_cores_are_divided_by_nodes_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two cores with two threads each, numbered as on Linux. The first thread is forbidden."""
    written(tmp_path / "node/node0/cpulist", "0-1,4-5")
    written(tmp_path / "node/node1/cpulist", "2-3,6-7")
    for core in range(8):
        pair = f"{core % 4},{core % 4 + 4}"
        written(tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list", pair)

    def divided(cores: set[int], parts: int) -> list[tuple[int, ...]]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
        return split_cores(parts, tmp_path / "node", tmp_path / "cpu")

    assert divided(set(range(8)), 2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert divided(set(range(8)), 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert divided(set(range(1, 8)), 2) == [(4, 1, 5), (2, 6, 3, 7)]
    assert divided({0, 1}, 2) == [(0,), (1,)]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert split_cores(2) == [(), ()]
