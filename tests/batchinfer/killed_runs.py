"""Runs that are killed and resumed, next to undisturbed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.core.errors import BatchInferError
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import Outcome, run

REAL = RunOptions(waves_from_s=float("inf"))
DETERMINISTIC = {"device": "cpu", "deterministic": True, "block_size": 16}


def published(path: Path) -> list[bytes]:
    """Return the files of a job's result."""
    return [file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))]


def killed_and_whole(
    whole: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, *small: tuple[str, str]
) -> tuple[Outcome, Outcome]:
    """Run one job with two engines, and an equal job with an engine that dies after 9 answers and restarts.

    Return the outcomes of the first run and of the resumed run, whose results have equal bytes.

    Args:
        small: settings of the second job.
    """
    outcome = run(whole, REAL, ("engine.data_parallel", "2"))
    assert (outcome.exit_code, outcome.row["replicas"]) == (0, 2)
    monkeypatch.setenv("DIES_AFTER", "9")
    monkeypatch.setenv("DIED", str(killed.parent / "died"))
    one = (*small, ("engine.data_parallel", "1"))
    with pytest.raises(BatchInferError):
        run(killed, replace(REAL, engine="tests.batchinfer.dying_engine:build"), *one)
    resumed = run(killed, REAL, *one)
    assert resumed.exit_code == 0
    assert published(killed) == published(whole)
    return outcome, resumed
