"""Tests the build of the operators: once for all callers, in parallel with other work, and stoppable."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.background_build import BackgroundBuild
from batchinfer_kernels.cpu.compilers import NoCompiler
from tests.kernels.fake_compiler import fake_compiler
from tests.patience import PATIENCE_S, wait_until

NEVER_S = 2 * PATIENCE_S  # a build of this duration is not waited for
CALLS = len(build.SOURCES) + 1  # and one links


def test_every_source_is_a_unit_or_included():
    included = {path.name for path in build.FOLDER.glob("*.c")}
    assert {source.name for source in (*build.SOURCES, *build.CODES)} == included


def test_processes_that_build_at_once_build_once(monkeypatch, tmp_path):
    compiler, log = fake_compiler(tmp_path, 0.2)
    monkeypatch.setenv("CC", str(compiler))
    ask = "import sys; from pathlib import Path; from batchinfer_kernels.cpu.build import build_library; "
    ask += "print(build_library(Path(sys.argv[1])))"
    command = [sys.executable, "-c", ask, str(tmp_path / "cache")]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: subprocess.check_output(command, text=True).strip(), range(3)))
    assert len(set(found)) == 1
    assert Path(found[0]).read_text() == "made\n"
    assert log.read_text().split().count("begin") == CALLS


def test_building_runs_in_the_background(monkeypatch, tmp_path):
    compiler, log = fake_compiler(tmp_path, 0.1)
    monkeypatch.setenv("CC", str(compiler))
    building = BackgroundBuild.needed(tmp_path / "cache")
    assert building is not None
    assert building.ended is None
    assert build.build_library(tmp_path / "cache").exists()  # waits for it
    building.stop()
    assert building.ended is not None
    assert building.ended >= building.began
    assert log.read_text().split().count("begin") == CALLS
    assert BackgroundBuild.needed(tmp_path / "cache") is None


def test_a_stopped_build_ends_at_once_without_leftovers(monkeypatch, tmp_path):
    compiler, log = fake_compiler(tmp_path, NEVER_S)
    monkeypatch.setenv("CC", str(compiler))
    building = BackgroundBuild.needed(tmp_path / "cache")
    assert building is not None
    wait_until(log.exists)
    building.stop()
    assert building.ended is None
    assert "stopped" in str(building.error)
    assert "end" not in log.read_text()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_who_waits_for_another_build_can_be_stopped(monkeypatch, tmp_path):
    compiler, log = fake_compiler(tmp_path, NEVER_S)
    monkeypatch.setenv("CC", str(compiler))
    first, second = (BackgroundBuild.needed(tmp_path / "cache") for _ in range(2))
    assert first is not None
    assert second is not None
    wait_until(log.exists)
    second.stop()
    first.stop()
    assert second.ended is None
    assert first.ended is None


def test_a_build_that_fails_says_why(monkeypatch, tmp_path):
    compiler, _ = fake_compiler(tmp_path)
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "no such thing" >&2\nexit 1\n')
    monkeypatch.setenv("CC", str(compiler))
    building = BackgroundBuild.needed(tmp_path / "cache")
    assert building is not None
    wait_until(lambda: building.error is not None)
    assert "cannot build the operators: no such thing" in str(building.error)
    with pytest.raises(NoCompiler, match="no such thing"):
        build.build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_the_lock_each_process_builds_for_itself(monkeypatch, tmp_path):
    """The lock may belong to another user, or its owner may be stopped."""
    compiler, log = fake_compiler(tmp_path)
    monkeypatch.setenv("CC", str(compiler))
    lock = build.library_path(tmp_path / "cache").with_suffix(".lock")
    lock.mkdir(parents=True)  # cannot be opened, not even by root
    assert build.build_library(tmp_path / "cache").exists()
    lock = build.library_path(tmp_path / "other").with_suffix(".lock")
    lock.parent.mkdir()
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.build_library(tmp_path / "other").exists()
    assert log.read_text().split().count("begin") == 2 * CALLS


def test_a_cache_that_cannot_be_looked_into_is_no_library(monkeypatch, tmp_path):
    compiler, _ = fake_compiler(tmp_path)
    monkeypatch.setenv("CC", str(compiler))
    for ask in (build.build_library, BackgroundBuild.needed):
        with pytest.raises(NoCompiler, match="cannot be read"):
            ask(tmp_path / ("x" * 300))
