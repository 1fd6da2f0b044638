"""The forecast: null where nothing is known, zero for nothing to do, never above what a real run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchinfer.plan.forecast import forecast
from batchinfer.plan.plan import Plan
from batchinfer_kernels.cost import Peaks
from tests.model_costs import llama_cost

SHAPE = llama_cost(2, 64, 128, 4, 2, 16, 1000, 4, 4)
PEAKS = Peaks(1e9, 1e8)


def plan(to_run: int = 10, shared: int = 0) -> Plan:
    return Plan(Path("plan.parquet"), to_run, 0, to_run, 0, 0, to_run, 100 * to_run, 20 * to_run, shared, 120)


def test_unknown_hardware_gives_null_never_zero() -> None:
    assert forecast(plan(), SHAPE, None, 8).seconds is None
    assert forecast(plan(), None, PEAKS, 8).flops is None


def test_nothing_to_run_takes_no_time() -> None:
    assert forecast(plan(0), SHAPE, PEAKS, 8).seconds == 0.0


def test_it_counts_tokens_flops_and_memory() -> None:
    got = forecast(plan(), SHAPE, PEAKS, 8)
    assert (got.prefill_tokens, got.decode_tokens) == (1000, 200)
    assert got.flops is not None
    assert got.flops >= 2 * SHAPE.active_parameters * 1200
    assert got.kv_bytes == 8 * 120 * SHAPE.kv_bytes_per_token
    assert got.seconds is not None
    assert got.seconds >= got.flops / PEAKS.flops_per_s


def test_sharing_and_larger_batches_make_it_faster() -> None:
    base = forecast(plan(), SHAPE, PEAKS, 2).seconds
    assert base is not None
    assert (forecast(plan(shared=500), SHAPE, PEAKS, 2).seconds or 0) < base
    assert (forecast(plan(), SHAPE, PEAKS, 10).seconds or 0) < base


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        forecast(plan(), SHAPE, PEAKS, 0)
