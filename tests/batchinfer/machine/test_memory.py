"""Available memory: the machine's, or a container's limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.machine.memory import available_memory, resident_memory, total_memory


def container(folder: Path, limit: str, used: int, file_pages: int) -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - file_pages}\ninactive_file {file_pages}\n")
    return folder


def test_memory_is_what_the_machine_or_the_container_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9999999 kB\nMemAvailable:    1000 kB\n")
    no_limit = container(tmp_path / "a", "max", 5000, 0)
    tight = container(tmp_path / "b", "600000", 500_000, 200_000)
    over = container(tmp_path / "c", "600000", 900_000, 0)
    old = tmp_path / "d" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("700000")
    (old / "memory.usage_in_bytes").write_text("600000")
    folders = (tmp_path / "nothing", no_limit, tight, over, tmp_path / "d")
    available = [available_memory(meminfo, folder) for folder in folders]
    assert available == [1_024_000, 1_024_000, 300_000, 0, 100_000]
    assert available_memory() > 0
    machine = total_memory(tmp_path / "nothing")
    assert machine > 2**28
    assert [total_memory(folder) for folder in folders] == [machine, machine, 600_000, 600_000, 700_000]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no limit")
@pytest.mark.parametrize(("lift", "code"), [("", 1), ("; lift_memory_limit()", 0)])
def test_a_limit_on_memory_can_be_lifted(lift: str, code: int) -> None:
    source = f"from batchinfer.machine.memory import *; limit_memory(1 << 26){lift}; bytearray(1 << 28)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("MemoryError" in done.stderr) == bool(code)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_thread_that_ends_meanwhile_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.glob
    gone = Path("/proc/self/task/0/children")
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: [gone, *listed(folder, pattern)])
    assert resident_memory()


def test_peak_memory_of_a_child_excludes_its_parent() -> None:
    source = "from batchinfer.machine.memory import peak_memory; print(peak_memory())"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {source!r}])"
    filled = f"x = bytes(range(256)) * (1 << 20); {child}"  # 256 MiB
    done = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(done.stdout) < 128 << 20
