"""Samples of a job's rows: drawn from the whole input, with a correct error estimate."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.input.reader import SpreadSample
from batchinfer.plan.forecast.sampled_rows import RUN_ROWS, SampledRows, relative_error
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.order.prefixes import PlannedPrefix
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, runs_on, text

LENGTHS = np.random.default_rng(7).integers(1, 60, 4000)


def varied(count: int) -> list[dict[str, str]]:
    return [{"id": f"r{i}", "text": f"{i} " + "word " * int(LENGTHS[i])} for i in range(count)]


def test_the_first_user_of_a_prefix_saves_nothing() -> None:
    node = PlannedPrefix(
        node=1, parent=None, prefix_tokens=9, own_tokens=5, users=4, saved_tokens=15, token_offset=0
    )
    whole = SampledRows(rows=10, of_rows=25).whole_prefix(node)
    assert (whole.users, whole.saved_tokens) == (10, 5 * 9)


@given(st.integers(1, 40), st.integers(0, 100), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_strata_take_the_same_rows_however_they_are_batched(rows: int, more: int, batches: list[int]) -> None:
    strata = SpreadSample(rows + more, rows)
    taken, first = [], 0
    for count in batches:
        for start, end in strata.runs(first, count):
            assert 0 <= start < end <= count
            taken += range(first + start, first + end)
        first += count
    begin = more // 2
    assert taken == [row for row in range(first) if begin <= row % (rows + more) < begin + rows]


def test_a_sample_estimates_the_whole_input(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_on(monkeypatch, machine_of(1e9))
    path = write_job(tmp_path, model, varied(800), sampling={"max_tokens": 4, "ignore_eos": True})
    whole, part = planned(path), planned(path, sample=200)
    assert part.sample.of_rows == part.plan.rows == 800
    assert 180 <= part.sample.rows <= 220
    assert 0 < part.sample.error < 0.1
    for name in ("prompt_tokens", "expected_tokens"):
        told, truth = getattr(part.plan, name), getattr(whole.plan, name)
        assert told == pytest.approx(truth, rel=1.5 * part.sample.error), name
    assert part.plan.to_run == 800
    assert part.forecast.run.flops == pytest.approx(whole.forecast.run.flops, rel=0.1)
    assert part.forecast.run.steps == pytest.approx(whole.forecast.run.steps, rel=0.15)
    said = text(part)
    assert "of 800 rows: token counts are off by at most" in said
    assert "no error rows in the sample" in said
    assert forecast_json(part, None)["sample"]["of_rows"] == 800
    assert part.prefixes[0].users == pytest.approx(800, rel=0.05), "all share the system prompt"


def test_a_sample_of_a_table_has_its_columns(tmp_path: Path, model: Path) -> None:
    pq.write_table(pa.Table.from_pylist(varied(900)), tmp_path / "in.parquet", row_group_size=100)
    output = {"path": "out", "columns": ["text"]}
    path = write_job(tmp_path, model, input={"path": "in.parquet"}, output=output)
    found = planned(path, sample=64)
    assert (found.sample.of_rows, found.plan.rows) == (900, 900)
    assert 48 <= found.sample.rows <= 80


def test_an_input_smaller_than_the_sample_is_read_whole(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(40))
    assert planned(path, sample=40).sample is None
    few = planned(path, sample=1)
    assert (few.sample.rows, few.sample.error) == (1, None)
    assert "rows: too few to estimate the error of token counts;" in text(few)


def test_a_sample_of_a_query_uses_one_execution(tmp_path: Path, model: Path) -> None:
    """A random query would otherwise return other rows the second time."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in varied(900)))
    query = "select *, row_number() over () as n from read_json('in.jsonl') where random() < 0.9"
    path = write_job(tmp_path, model, input={"path": None, "sql": query, "id": "id"})
    found = planned(path, sample=64)
    assert 700 < found.sample.of_rows == found.plan.rows < 900
    assert 40 <= found.sample.rows <= 80
    assert found.error_codes == {}


def test_the_error_holds_19_times_of_20() -> None:
    """For rows in any order and for increasing lengths, 200 samples each."""
    rng = np.random.default_rng(3)
    rows = [row for start, end in SpreadSample(160, RUN_ROWS).runs(0, 16_000) for row in range(start, end)]
    for rising in (0.0, 1.0):
        held = 0
        for _ in range(200):
            everything = rng.gamma(2.0, 100.0, 16_000) + rising * np.arange(16_000) / 50
            sample = everything[rows].astype(np.int64)
            held += abs(sample.mean() / everything.mean() - 1) <= relative_error(sample, 16_000)
        assert 0.91 <= held / 200 <= 0.99
