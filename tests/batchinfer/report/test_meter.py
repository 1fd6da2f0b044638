"""The meter: totals, percentiles (compared with NumPy), memory and files."""

from __future__ import annotations

import tempfile
from dataclasses import astuple, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.report.tables.columns.declared import BUCKETS, PHASES, PREFIXES, REQUESTS, SCHEMAS, STEPS
from batchinfer.report.tables.details import Machine
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.meter import Measured, Meter
from batchinfer_kernels.cost import Peaks
from tests.examples import examples

counts = st.integers(0, 10_000)
spans = st.floats(0.001, 100)


@st.composite
def step_lists(draw: Any) -> list[StepSample]:
    """Draw the steps of one engine, with idle time between them."""
    clock, samples = 0.0, []
    for number in range(draw(st.integers(1, 12))):
        clock += draw(st.floats(0, 5))
        duration = draw(spans)
        tokens = [draw(counts) for _ in range(6)]
        state = [draw(counts) for _ in range(5)]
        cost = (draw(counts), draw(counts), draw(st.none() | spans))
        samples.append(StepSample(number, clock, duration, duration / 2, *tokens, *state, *cost))
        clock += duration
    return samples


@st.composite
def request_samples(draw: Any) -> RequestSample:
    key = draw(st.binary(min_size=32, max_size=32))
    times = np.cumsum([draw(spans) for _ in range(4)]).tolist()
    return RequestSample(key, *(draw(counts) for _ in range(4)), *times)


def measure(steps: list[StepSample], requests: list[RequestSample], folder: Path, **options: Any) -> Measured:
    with Meter(folder, "r", **options) as meter:
        for step in steps:
            meter.step(step)
        for request in requests:
            meter.request(request)
        return meter.finish()


def percentiles_of(measured: Measured, name: str) -> list[float | None]:
    return [measured[f"{name}_{share}_s"] for share in ("p50", "p90", "p99")]


def rows_of(folder: Path, table: str) -> pa.Table:
    return pq.read_table(table_path(folder, table, "r"))


@settings(max_examples=examples(3, 20), deadline=None)
@given(steps=step_lists(), buffer_rows=st.integers(1, 5))
def test_totals_are_the_sums_and_the_table_holds_every_step(
    steps: list[StepSample], buffer_rows: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(
            steps, [], Path(folder), machine=Machine(None, Peaks(3.0, 2.0)), buffer_rows=buffer_rows
        )
        table = rows_of(Path(folder), STEPS)
    sums = {
        "prompt_tokens_run": "prompt_tokens", "decode_tokens_run": "decode_tokens", "flops": "flops",
        "recomputed_tokens": "recomputed_tokens", "prefix_saved_tokens": "cached_tokens", "bytes_moved": "bytes",
        "sampled_tokens": "sampled_tokens",
    }  # fmt: skip
    for name, of_step in sums.items():
        assert measured[name] == sum(getattr(s, of_step) for s in steps)
    assert measured["step_bound_s"] == pytest.approx(sum(max(s.flops / 3.0, s.bytes / 2.0) for s in steps))
    last = steps[-1]
    assert measured["engine_wall_s"] == pytest.approx(last.started_s + last.duration_s - steps[0].started_s)
    known = [s.roofline_s for s in steps if s.roofline_s is not None]
    assert measured["roofline_s"] == (pytest.approx(sum(known)) if len(known) == len(steps) else None)
    assert table.schema.equals(SCHEMAS[STEPS])
    shared = [f.name for f in fields(StepSample)]
    assert [tuple(row[n] for n in shared) for row in table.to_pylist()] == [astuple(s) for s in steps]
    check_itl(steps, percentiles_of(measured, "itl"))


def check_itl(steps: list[StepSample], found: list[float | None]) -> None:
    """Check percentiles of the time between tokens. Each decoded token counts once."""
    ends = [s.started_s + s.duration_s for s in steps]
    gaps = np.repeat(np.diff(ends), [s.decode_tokens for s in steps[1:]])
    if gaps.size:
        expected = np.percentile(gaps, [50, 90, 99], method="inverted_cdf")
        assert found == pytest.approx(expected.tolist(), abs=1e-9)
    else:
        assert found == [None] * 3


@settings(max_examples=examples(3, 20), deadline=None)
@given(requests=st.lists(request_samples(), min_size=1, max_size=20))
def test_percentiles_are_those_of_numpy(requests: list[RequestSample]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measured = measure([], requests, Path(folder), buffer_rows=3)
        table = rows_of(Path(folder), REQUESTS)
    assert table.schema.equals(SCHEMAS[REQUESTS])
    assert table["key"].to_pylist() == [r.key.hex() for r in requests]
    expected = {
        "ttft": [r.first_token_s - r.queued_s for r in requests],
        "queue": [r.scheduled_s - r.queued_s for r in requests],
        "latency": [r.finished_s - r.queued_s for r in requests],
        "tpot": [(r.finished_s - r.first_token_s) / (r.completion_tokens - 1) for r in requests
            if r.completion_tokens > 1],
    }  # fmt: skip
    for name, values in expected.items():
        found = percentiles_of(measured, name)
        if values:
            assert found == pytest.approx(np.percentile(values, [50, 90, 99]).tolist())
        else:
            assert found == [None] * 3


def test_idle_time_is_the_time_between_steps_of_one_engine(tmp_path: Path, step: Any) -> None:
    """The second engine replaced the first."""
    steps = [step(0), step(1), step(2, started_s=5.0), step(0, started_s=0.5), step(1, started_s=2.0)]
    with Meter(tmp_path, "r") as meter:
        for number, one in enumerate(steps):
            meter.step(one, engine=number // 3)
        measured = meter.finish()
    assert measured["idle_s"] == pytest.approx(0.25 + 3.25 + 0.75)
    rows = rows_of(tmp_path, STEPS).to_pylist()
    assert [row["engine"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["interval_s"] for row in rows] == [None, 1.0, 4.0, None, 1.5]


def test_times_of_parallel_engines_are_averaged(tmp_path: Path, step: Any) -> None:
    """One engine works for 5.75 s, the other for 2.75 s, each on its own device. The rest is idle time."""
    first = [step(0), step(1), step(2, started_s=5.0)]
    second = [step(0), step(1, started_s=2.0)]
    with Meter(tmp_path, "r", Machine(None, Peaks(1000.0, 200.0), 2)) as meter:
        for one, other in zip_longest(first, second):
            meter.step(one, 0, 0)
            if other is not None:
                meter.step(other, 1, 1)
        totals = meter.finish()
    assert totals["engine_wall_s"] == pytest.approx(5.75)
    steps = [*first, *second]
    assert totals["steps"] == 5
    assert totals["model_s"] == pytest.approx(sum(one.model_s for one in steps) / 2)
    assert totals["idle_s"] == pytest.approx(5.75 - sum(one.duration_s for one in steps) / 2)
    assert totals["flops"] == sum(one.flops for one in steps)
    rows = rows_of(tmp_path, STEPS).to_pylist()
    assert [(row["engine"], row["replica"]) for row in rows] == [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]
    (phase,) = rows_of(tmp_path, PHASES).to_pylist()
    assert phase["device_s"] == pytest.approx(totals["model_s"])
    assert phase["mfu"] == pytest.approx(totals["flops"] / (phase["engine_s"] * 2000.0))


def test_without_peaks_nothing_is_claimed(tmp_path: Path, step: Any) -> None:
    totals = measure([step(0, roofline_s=None), step(1)], [], tmp_path)
    assert totals["roofline_s"] is None
    assert totals["step_bound_s"] is None


def test_nothing_measured_is_empty_tables(tmp_path: Path) -> None:
    measured = measure([], [], tmp_path / "new")
    assert percentiles_of(measured, "itl") == percentiles_of(measured, "ttft") == [None] * 3
    for table in (STEPS, REQUESTS, PHASES, BUCKETS, PREFIXES):
        assert rows_of(tmp_path / "new", table).num_rows == 0


def test_an_error_leaves_no_files(tmp_path: Path, step: Any) -> None:
    def fail_half_way() -> None:
        with Meter(tmp_path, "r", buffer_rows=1) as meter:
            meter.step(step(0))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_rows_go_to_disk_while_the_run_lasts(tmp_path: Path, step: Any, request_sample: Any) -> None:
    with Meter(tmp_path, "r", buffer_rows=10) as meter:
        for number in range(55):
            meter.step(step(number))
            meter.request(request_sample(number))
        assert sorted(p.suffix for p in tmp_path.iterdir()) == [".tmp", ".tmp"]
        meter.finish()
    assert pq.ParquetFile(table_path(tmp_path, STEPS, "r")).metadata.num_row_groups == 6
    assert pq.read_metadata(table_path(tmp_path, REQUESTS, "r")).num_rows == 55
    names = ("buckets", "phases", "prefixes", "requests", "steps")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{name}-r.parquet" for name in names]
