"""Forecasts of a job on several engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import people, run, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, text
from tests.batchinfer.test_replicas import TWO, pytestmark  # noqa: F401  (two engines need two cores)

GPU = replace(machine_of(1e12), device="cuda", cores=None, memory_bytes=80 << 30)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 96}
ANSWERS = {"max_tokens": 7, "ignore_eos": True}


@pytest.fixture
def job(tmp_path: Path, model: Path, known_peaks: Hardware) -> Path:
    return write_job(tmp_path, model, people(160), sampling=ANSWERS, engine=LIMITS)


def test_engines_that_share_a_cpu_are_not_faster_at_its_limit(job: Path) -> None:
    one, two = planned(job), planned(job, TWO)
    assert (one.forecast.seconds or 0) * 0.95 < (two.forecast.seconds or 0) < (one.forecast.seconds or 0) * 2
    assert two.forecast.run.sampled_tokens == pytest.approx(one.forecast.run.sampled_tokens, rel=0.02)
    assert "2 engines" in text(two)
    assert two.memory.weights == 2 * one.memory.weights


def test_each_gpu_engine_has_its_own_device(job: Path) -> None:
    """Two engines have half of the rows each and take half of the time. Both compute the common prefix."""
    one, two = planned(job, hardware=GPU).forecast, planned(job, TWO, hardware=GPU).forecast
    assert one.seconds * 0.45 < (two.seconds or 0) < one.seconds * 0.75
    assert two.run.sampled_tokens == pytest.approx(one.run.sampled_tokens, rel=0.02)
    assert two.run.flops == pytest.approx(one.run.flops, rel=0.1)
    assert 0.6 * (one.mfu or 0) < (two.mfu or 0) < 1.1 * (one.mfu or 0)


def test_the_run_then_computes_what_was_forecast(job: Path) -> None:
    before = planned(job, TWO).forecast
    row = run(job, RunOptions(), TWO).row
    assert row["forecast_output_tokens"] == before.run.sampled_tokens
    assert row["output_tokens"] == pytest.approx(before.run.sampled_tokens, rel=0.02)
    # an engine of this size may have run dry before the next rows reach it, and then runs their prefix again
    assert 0.9 < row["prompt_tokens_run"] / before.run.prefill_tokens < 1.4
    assert row["steps"] == pytest.approx(before.run.steps, rel=0.35)
