"""The forecast: null where nothing is known, zero for nothing to do, never above what a real run needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.plan.forecast import forecast
from batchinfer.plan.plan import Plan
from batchinfer_kernels.cost import ModelCost, Peaks
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
    assert got.kv_bytes == 8 * 120 * SHAPE.kv_bytes(1)
    assert got.seconds is not None
    assert got.seconds >= got.flops / PEAKS.flops_per_s


def windowed(*windows: int | None) -> ModelCost:
    """The same layers with these windows."""
    caches = tuple((window, size) for window, (_, size) in zip(windows, SHAPE.caches, strict=True))
    return replace(SHAPE, windows=windows, caches=caches)


def test_layers_with_a_window_attend_to_no_more_and_hold_no_more() -> None:
    """Prompts of 100 tokens and contexts of 110 in the mean, 120 at the most."""
    cut = windowed(40, None)
    assert cut.pairs(100) == sum(min(at, 40) + at for at in range(1, 101))
    got, whole = forecast(plan(), cut, PEAKS, 8), forecast(plan(), SHAPE, PEAKS, 8)
    assert got.kv_bytes == 8 * (40 + 120) * SHAPE.kv_bytes(1) // 2
    pair = next(operator.pair.flops for operator in SHAPE.operators if operator.name == "attention")
    saved = 10 * (100 * 101 // 2 - cut.pairs(100) + 100 * 101 // 2) + 25 * 8 * (110 - 40)
    assert whole.flops is not None
    assert got.flops == whole.flops - pair * saved
    wide = forecast(plan(), windowed(120, None), PEAKS, 8)
    assert wide == whole


def test_sharing_and_larger_batches_make_it_faster() -> None:
    base = forecast(plan(), SHAPE, PEAKS, 2).seconds
    assert base is not None
    assert (forecast(plan(shared=500), SHAPE, PEAKS, 2).seconds or 0) < base
    assert (forecast(plan(), SHAPE, PEAKS, 10).seconds or 0) < base


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        forecast(plan(), SHAPE, PEAKS, 0)
