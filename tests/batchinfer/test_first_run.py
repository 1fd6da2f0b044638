"""Tests the first run on a machine: operators are compiled while the input is read."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from batchinfer.pipeline.operators_build import COMPILING, build_in_background
from batchinfer.plan.setup.numerics import Numerics
from batchinfer_kernels.cpu.background_build import BackgroundBuild
from batchinfer_kernels.cpu.build import build_library
from tests import warm_commands
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.kernels.fake_compiler import fake_compiler
from tests.patience import PATIENCE_S

CPU = Numerics("cpu", "bfloat16", 512)


def batchinfer(cache: Path, compiler: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "CC": str(compiler)}
    command = [sys.executable, "-m", "batchinfer", *words]
    return warm_commands.run(
        command, capture_output=True, text=True, env=env, check=False, timeout=PATIENCE_S
    )


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    """Write a fake compiler that returns the compiled operators at once."""
    path = tmp_path / "quick-cc"
    path.write_text(
        f'#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && exec cp \'{build_library()}\' "$2"; shift; done\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up a machine without compiled operators and with a fake compiler; return the path of its log."""
    compiler, log = fake_compiler(tmp_path)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return log


def test_the_first_run_compiles_for_all(tmp_path, model, quick, monkeypatch):
    job = write_job(tmp_path, model, people(3))
    first = batchinfer(tmp_path / "cache", quick, "run", str(job))
    assert first.returncode == 0, first.stderr
    assert COMPILING in first.stderr
    assert "compiled the CPU operators in" in first.stderr
    ((build_s, wait_s, load_s),) = duckdb.sql(
        "SELECT operators_build_s, operators_wait_s, load_s FROM read_parquet("
        f"'{tmp_path}/out/res-report/run-*.parquet')"
    ).fetchall()
    assert build_s > 0
    assert 0 <= wait_s <= load_s + 0.5
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(quick))
    assert BackgroundBuild.needed() is None


@pytest.mark.slow
def test_a_run_without_work_compiles_nothing(tmp_path, model):
    compiler, log = fake_compiler(tmp_path)
    job = write_job(tmp_path, model, people(3))
    for words in (("plan", str(job)), ("run", "--help"), ("doctor",)):
        assert batchinfer(tmp_path / "cache", compiler, *words).returncode == 0
    assert not log.exists()


@pytest.mark.slow
def test_a_run_that_ends_early_ends_the_compiler(tmp_path, model):
    """All rows are error rows, which need no engine."""
    compiler, log = fake_compiler(tmp_path, 60)
    job = write_job(tmp_path, model, ["{broken"] * 3)
    ended = batchinfer(tmp_path / "cache", compiler, "run", str(job))
    assert ended.returncode == 65, ended.stderr
    assert COMPILING in ended.stderr
    assert not log.exists() or "end" not in log.read_text()


def test_without_a_compiler_the_engine_logs_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    notices: list[str] = []
    with build_in_background(CPU, notices.append) as operators:
        operators.mark_needed()
        operators.notify_progress()
    assert not notices
    assert operators.facts == {}


def test_nothing_is_compiled_for_a_gpu(nothing_compiled):
    notices: list[str] = []
    with build_in_background(replace(CPU, device="cuda"), notices.append) as operators:
        operators.mark_needed()
    assert not notices
    assert not nothing_compiled.exists()


def test_early_compilation_takes_no_time_of_the_engine(nothing_compiled):
    notices: list[str] = []
    with build_in_background(CPU, notices.append) as operators:
        operators.notify_progress()
        assert operators._build is not None
        operators._build._thread.join()
        operators.mark_needed()
        operators.notify_progress()
    assert operators.facts["operators_wait_s"] == 0 < operators.facts["operators_build_s"]
    assert notices[0] == COMPILING
    assert len(notices) == 2
