"""The forecast of `batchinfer plan`, compared with the following run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.drafts.draft_model import spare_blocks
from batchinfer.engine.schedule.budget import HOST_STEP_S, further_host_s
from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline.options import RunOptions
from batchinfer.plan.forecast import run as run_forecast
from batchinfer.plan.forecast import step_times as step_times_module
from batchinfer.plan.forecast.job import JobForecast
from batchinfer.plan.forecast.run import RunForecast, forecast_run
from batchinfer.plan.forecast.step_times import step_times
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.step_parts import PARTS
from batchinfer.plan.simulation.step_time import HOST_ROW, HOST_STEP, StepTime
from batchinfer.report.summary import summary
from batchinfer.report.tables.columns.declared import REQUESTS, RUN, STEPS
from batchinfer.report.tables.earlier_runs import (
    LAUNCHED_STEPS,
    STEP_COLUMNS,
    EarlierSteps,
    earlier_lengths,
    earlier_power,
    earlier_steps,
)
from batchinfer.report.tables.folder import table_path
from batchinfer_kernels.cost import Peaks, StepShape
from tests.batchinfer.pipeline.test_pipeline import people, run, write_job
from tests.batchinfer.plan.forecast.forecasts import machine_of, planned, quick_plan, runs_on, text
from tests.model_costs import llama_cost
from tests.settings import setting_of

REAL = RunOptions()
FIXED, SMALL_STEPS = {"max_tokens": 7, "ignore_eos": True}, {"max_num_seqs": 8, "max_num_batched_tokens": 96}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Nights(NamedTuple):
    """Forecasts of a job before and after a first run that answered half of the later rows."""

    first: JobForecast
    row: dict[str, Any]
    second: JobForecast
    folder: Path


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Nights:
    folder = tmp_path_factory.mktemp("nights")
    with pytest.MonkeyPatch.context() as patch:
        quick_plan(patch)
        runs_on(patch, machine_of(1e10))
        path = write_job(folder, model, people(30), sampling={"max_tokens": 50})
        first, row = planned(path), run(path).row
        write_job(folder, model, people(60), sampling={"max_tokens": 50})
        before, second = files(folder), planned(path)
        assert files(folder) == before, "a forecast changes nothing of a job"
        return Nights(first, row, second, folder)


def test_rows_are_counted_by_their_outcome(tmp_path: Path, model: Path, known_peaks: Hardware) -> None:
    rows: list[Any] = people(40)
    rows[7], rows[9], rows[30] = "{not json", {"id": "p9", "text": None}, rows[5] | {"id": "p30"}
    path = write_job(tmp_path, model, rows, on_error={"max_error_rate": 0.5})
    found = planned(path)
    assert (found.plan.rows, found.plan.error_rows, found.plan.duplicates) == (40, 2, 1)
    assert (found.plan.present, found.plan.to_run) == (0, 37)
    assert found.error_codes == {"bad_json": 1, "null_in_template": 1}
    assert sum(number for _, number in found.lengths.buckets) == 37
    assert found.lengths.shortest <= found.lengths.median <= found.lengths.longest
    assert found.forecast.seconds is not None
    assert (found.forecast.answers_from, found.forecast.times.basis) == (0, "limit")
    said = text(found)
    for words in (
        "40: 2 error rows (",
        "bad_json 1",
        "1 duplicate",
        "0 answers stored already, 37 to run",
        "steps at 50% of the hardware's peaks: an assumption",
        "whole run",
        "(assumed, before the first run)",
    ):
        assert words in said
    assert not (tmp_path / "out").exists(), "nothing was run or written"


def test_a_run_takes_the_steps_that_plan_showed(tmp_path: Path, model: Path, known_peaks: Hardware) -> None:
    """The lengths of answers are known, and a step gives one token per row. Uses a tiny model and the real engine."""
    path = write_job(tmp_path, model, people(60), sampling=FIXED, engine=SMALL_STEPS, drafts="off")
    before = planned(path)
    row = run(path, REAL).row
    forecast = before.forecast.run
    alike = ("steps", "sampled_tokens", "preemptions", "flops")
    facts = {name: getattr(forecast, name) for name in alike} | {
        "prompt_tokens_run": forecast.prefill_tokens,
        "decode_tokens_run": forecast.decode_tokens,
        "prefix_saved_tokens": forecast.cached_tokens,
        "bytes_moved": forecast.bytes,
        "forecast_s": before.forecast.seconds,
        "forecast_steps": forecast.steps,
        "forecast_prompt_tokens": forecast.prompt_tokens,
        "forecast_output_tokens": row["output_tokens"],
        "forecast_mfu": before.forecast.mfu,
        "forecast_mbu": before.forecast.mbu,
        "forecast_basis": "limit",
        "forecast_answers_from": 0,
    }
    assert {name: row[name] for name in facts} == facts
    assert row["forecast_error"] == pytest.approx(row["engine_wall_s"] / row["forecast_s"] - 1)
    assert "output 420 tokens, were 420" in summary(row)
    assert (forecast.launches, row["eager_steps"], row["capture_s"]) == (None, None, None), "this is a CPU"
    steps = pq.read_table(next((tmp_path / "out/res-report").glob("steps-*.parquet")))
    assert set(steps.column("blocks_total").to_pylist()) == {before.memory.blocks}
    again = planned(path)
    assert (again.plan.present, again.plan.to_run) == (60, 0)
    assert again.forecast is None
    assert "60 answers stored already, 0 to run" in text(again)


def spread(forecast: Any) -> float:
    """Return the upper end of the engine's range divided by its lower end."""
    least, most = forecast.within.engine_s
    assert least < forecast.seconds < most
    whole = forecast.within.run_s
    assert least < whole[0]
    assert most < whole[1]
    return float(most / least)


def test_a_first_forecast_knows_what_steps_take_and_the_next_one_what_they_took(
    tmp_path: Path, model: Path, known_peaks: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first forecast assumes three times the minimum for each part of a step. A run improves it."""
    options = {"sampling": {"max_tokens": 20, "ignore_eos": True}, "engine": {"max_num_seqs": 4}}
    path = write_job(tmp_path, model, people(20), **options)
    least = planned(path).forecast
    assert least.times.basis == "limit"
    times = {**dict.fromkeys(PARTS, 3.0), "layers": 0.0, "rows": 0.0, HOST_STEP: 0.0, HOST_ROW: 0.0}
    runs_on(monkeypatch, replace(known_peaks, step_times={"float32": times}))
    first = planned(path)
    assert first.forecast.times.basis == "measured"
    # computing and moving add up here
    assert 3 * least.run.seconds <= first.forecast.seconds <= 6 * least.run.seconds
    assert least.seconds > 2 * least.run.seconds + least.run.steps * HOST_STEP_S
    assert spread(least) > spread(first.forecast)
    assert "`batchinfer doctor --measure` measured on this machine" in text(first)
    row = run(path, REAL).row
    write_job(tmp_path, model, [{**one, "text": one["text"] + "!"} for one in people(20)], **options)
    second = planned(path)
    assert (second.forecast.times.basis, second.forecast.times.runs) == ("runs", 1)
    assert second.forecast.seconds == pytest.approx(row["engine_wall_s"], rel=0.5)
    assert second.forecast.within.runs == 1
    assert "(as in 1 earlier run)" in text(second)
    other = second.forecast.within.other_s
    assert other[0] < row["wall_s"] - row["engine_s"] < other[1]
    assert "as fast as in 1 earlier run" in text(second)


def test_answers_are_as_long_as_those_of_earlier_runs(nights: Nights) -> None:
    found = nights.second
    assert (found.plan.present, found.plan.to_run) == (30, 30)
    assert found.forecast.answers_from == 1
    requests = next((nights.folder / "out/res-report").glob("requests-*.parquet"))
    lengths = pq.read_table(requests).column("completion_tokens").to_numpy()
    mean = found.forecast.run.sampled_tokens / found.plan.to_run
    assert lengths.min() <= mean <= lengths.max()
    assert "with lengths as in 1 earlier run" in text(found)


def test_idle_time_of_devices_is_forecast_by_cause(nights: Nights) -> None:
    first, second = nights.first, nights.second
    assert (first.idle.load_s, first.idle.publish_s, first.idle.runs) == (None, None, 0)
    assert 0 < first.idle.plan_s < first.idle.total_s < 30
    assert "not known before the first run" in text(first)
    assert (second.idle.load_s, second.idle.tail_s, second.idle.runs) == (nights.row["idle_load_s"], 0.0, 1)
    assert second.idle.publish_s == pytest.approx(2 * nights.row["idle_publish_s"])
    assert forecast_json(second, None)["idle"]["runs"] == 1


def test_a_draft_model_has_a_forecast_of_its_own(tmp_path: Path, model: Path, known_peaks: Hardware) -> None:
    drafts = {"model": str(model), "runs": "first"}
    found = planned(write_job(tmp_path, model, people(5), drafts=drafts, deadline="06:00"))
    assert found.drafting.seconds > 0
    both = found.deadline.left_s - found.drafting.seconds - found.forecast.seconds
    assert found.deadline.spare_s == pytest.approx(both)
    assert "answers all rows first: the job says so" in text(found)
    assert "the draft model's answers, before the engine's time" in text(found)
    assert forecast_json(found, None)["drafting"]["engine_s"] == found.drafting.seconds
    plain = planned(write_job(tmp_path, model, people(5)))
    assert forecast_json(plain, None)["drafting"] is None
    assert plain.forecast.seconds == pytest.approx(found.forecast.seconds)


def test_a_draft_model_takes_memory(tmp_path: Path, model: Path, known_peaks: Hardware) -> None:
    drafts = {"model": str(model), "runs": "beside"}
    engine = {"kv_memory": "16MiB"}
    found = planned(write_job(tmp_path, model, people(5), engine=engine, drafts=drafts))
    plain = planned(write_job(tmp_path, model, people(5), engine=engine, drafts="off"))
    assert found.drafting is None
    assert found.memory.weights == 2 * plain.memory.weights
    size, blocks = plain.memory.kv_cache // plain.memory.blocks, found.memory.blocks
    assert found.memory.kv_cache == 2 * size * blocks
    spare = size * spare_blocks(plain.memory.block_size, 256)
    assert blocks in (plain.memory.blocks, ((16 << 20) - spare) // (2 * size))
    assert "proposes tokens in the engine of the job's model: the job says so" in text(found)
    assert forecast_json(found, None)["draft_model"] == {"runs": "beside", "why": "the job says so"}
    assert forecast_json(plain, None)["draft_model"] is None


def test_the_place_of_a_draft_model(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"float32": 1e12, "int8": 1e12}
    runs_on(monkeypatch, Hardware("a machine", "cpu", 2, 8 << 30, peaks, 1e9, "measured"))
    drafts = {"model": str(model), "quantization": "int8"}
    found = planned(write_job(tmp_path, model, people(5), engine={"max_num_seqs": 2}, drafts=drafts))
    assert found.draft_model["runs"] == "beside"
    assert "ms per token in the same engine" in found.draft_model["why"]
    small = {"max_num_seqs": 512, "kv_memory": "1MiB"}
    refused = planned(write_job(tmp_path, model, people(5), engine=small, drafts=drafts)).draft_model
    assert (refused["runs"], "do not fit into memory together" in refused["why"]) == ("first", True)
    runs_on(monkeypatch, Hardware("a machine", "cpu", 2, 8 << 30, {"float32": 1e12}, 1e9, "measured"))
    unknown = planned(write_job(tmp_path, model, people(5), drafts=drafts)).draft_model
    assert (unknown["runs"], "peaks are unknown" in unknown["why"]) == ("first", True)


def test_a_price_per_hour_gives_the_cost_of_a_run(tmp_path: Path, model: Path, known_peaks: Hardware) -> None:
    found = planned(write_job(tmp_path, model, people(5)))
    told = forecast_json(found, 7200.0)
    assert json.loads(json.dumps(told)) == told
    assert told["forecast"]["cost"] == pytest.approx(found.forecast.seconds * 2)
    assert "at 7200 an hour" in text(found, 7200.0)
    assert forecast_json(found, None)["forecast"]["cost"] is None
    assert "cost" not in text(found)


def test_without_peaks_no_time_is_known(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(monkeypatch, Hardware("a machine", "cpu", 2, 8 << 30))
    found = planned(write_job(tmp_path, model, people(5)))
    assert (found.forecast.seconds, found.forecast.mfu, found.forecast.mbu) == (None, None, None)
    assert found.forecast.run.steps > 0
    assert "doctor --measure" in text(found)


def test_of_a_large_job_a_part_is_simulated(
    tmp_path: Path, model: Path, known_peaks: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, model, people(120), sampling=FIXED, engine=SMALL_STEPS)
    whole = planned(path).forecast
    monkeypatch.setattr("batchinfer.plan.forecast.engine.REQUEST_BATCH", 10)
    monkeypatch.setattr("batchinfer.plan.forecast.job.PLAN_MOST_S", 0.005)
    found = planned(path)
    part = found.forecast
    assert 0 < part.simulated < 0.6
    assert "extrapolated from simulating" in text(found)
    assert part.run.sampled_tokens == pytest.approx(whole.run.sampled_tokens, rel=0.02)
    assert part.run.flops == pytest.approx(whole.run.flops, rel=0.05)
    assert part.run.seconds == pytest.approx(whole.run.seconds, rel=0.05)


@pytest.mark.parametrize(("raised", "lines"), [
    (OutOfMemory("of the engine"), ()),
    (MemoryError(), ("no forecast: too little memory to simulate the job",)),
    (ZeroDivisionError("by zero"), ("no forecast: ZeroDivisionError: by zero; please report it",)),
])  # fmt: skip
def test_a_run_continues_if_its_forecast_fails(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, lines: tuple[str, ...]
) -> None:
    monkeypatch.setattr(run_forecast, "forecast_engine", Mock(side_effect=raised))
    assert forecast_run(Mock(), Mock(), Mock(), Mock()) == RunForecast(None, lines)


def test_a_run_that_would_simulate_for_long_makes_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Mock(answers_from=0, run_budget_s=lambda: 1.5, simulation_s=lambda _: 4.6)
    monkeypatch.setattr(run_forecast, "forecast_engine", lambda *_: engine)
    assert forecast_run(Mock(), Mock(), Mock(), Mock()) == RunForecast()
    assert not engine.forecast.called


def test_of_many_earlier_steps_an_even_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times_module, "MOST_STEPS", 500)
    took = np.repeat([1e-4, 2e-3], 10_000)
    columns = {name: np.full(len(took), 8.0) for name in STEP_COLUMNS} | {
        LAUNCHED_STEPS: np.full(len(took), 2),  # the time of the host is that of two steps
        "prefill_tokens": np.zeros(len(took)),
        "recomputed_tokens": np.zeros(len(took)),
        "model_s": took,
        "interval_s": took + 1e-3,
    }
    peaks = {"float32": 1e12}
    setting = setting_of(Hardware("a CPU", "cpu", 2, None, peaks, 1e11, "measured"), "float32")
    cost = llama_cost(2, 64, 128, 2, 2, 32, 100, 4, 4)
    looked_at = Mock(side_effect=step_times_module.shape_of)
    monkeypatch.setattr(step_times_module, "shape_of", looked_at)
    found = step_times(setting, cost, EarlierSteps(1, columns))
    assert looked_at.call_count == 500, "a million take minutes"
    expected = StepTime(Peaks(1e12, 1e11)).device_s(StepShape(8, 8, 0, 0), cost)
    assert found.basis == "runs"
    assert found.time.decode_efficiency == pytest.approx(expected / took.mean(), rel=0.01)
    assert found.time.host_s(8) == pytest.approx(2e-3 - further_host_s(1, 8)), (
        "the host time of later steps is subtracted"
    )


def test_rows_that_set_their_own_parameters_are_named(tmp_path: Path, model: Path) -> None:
    rows = [{**row, "most": 3} for row in people(4)]
    sampling = {"max_tokens": 8, "from_columns": {"max_tokens": "most"}}
    notices: list[str] = []
    found = planned(write_job(tmp_path, model, rows, sampling=sampling), notices=notices)
    assert "rows set their own max_tokens (column most)" in notices
    assert found.plan.expected_tokens == 12


def request(key: int, prompt: int, **params: Any) -> Request:
    return Request(key.to_bytes(32, "little"), np.zeros(prompt, np.int32), SamplingParams(**params))


def test_lengths_are_spread_as_those_of_prompts_of_about_the_same_length() -> None:
    prompts = np.array([10, 11, 12, 100, 101, 102])
    answers = np.array([1, 2, 3, 50, 60, 70])
    known = AnswerLengths.of(prompts, answers, np.zeros(6, bool))

    def lengths(prompt: int, **params: Any) -> list[int]:
        return sorted(known.of_requests(request(key, prompt, **params) for key in range(30)).values())

    assert lengths(9, max_tokens=100) == [1] * 10 + [2] * 10 + [3] * 10
    assert lengths(3000, max_tokens=100) == [50] * 10 + [60] * 10 + [70] * 10
    assert set(lengths(100, max_tokens=20)) == {20}
    assert set(lengths(9, max_tokens=20, ignore_eos=True)) == {20}
    assert set(AnswerLengths.unknown().of_requests([request(1, 9, max_tokens=20)]).values()) == {20}


@pytest.mark.parametrize("cores", [2, None])
def test_steps_of_earlier_runs_count_only_on_the_same_machine_and_arithmetic(
    tmp_path: Path, cores: int | None
) -> None:
    """GPUs have no number of cores. Older tables have no number of steps launched together: it is one."""
    arithmetic = {"dtype": "float32", "quantization": "none", "deterministic": False}
    alike: dict[str, Any] = {"model": "m", "hardware": "a", "cores": cores, "device": "cpu", **arithmetic}
    steps = {name: pa.array([1.0, 2.0]) for name in STEP_COLUMNS}
    machines = [alike, {**alike, "hardware": "b"}, {**alike, "model": "n"}, alike]
    for night, machine in enumerate(machines):
        run_id = f"202611{night + 10}T000000Z-0000000"
        row = pa.table({k: pa.array([v], pa.int64() if k == "cores" else None) for k, v in machine.items()})
        pq.write_table(row, table_path(tmp_path, RUN, run_id))
        own = steps | {LAUNCHED_STEPS: pa.array([3, 3])} if night else steps
        pq.write_table(pa.table(own), table_path(tmp_path, STEPS, run_id))
    found = earlier_steps(tmp_path, alike)
    assert (found.runs, len(found.columns["running"])) == (2, 4)
    assert sorted(found.columns[LAUNCHED_STEPS]) == [1, 1, 3, 3]
    assert earlier_steps(tmp_path, {**alike, "cores": 4}) is None


def test_power_is_averaged_over_similar_earlier_runs(tmp_path: Path) -> None:
    """Unknown energy is null, never 0."""
    alike: dict[str, Any] = {"model": "m", "hardware": "a"}
    runs: list[tuple[str, float | None, float | None]] = [
        ("a", 300.0, 10.0), ("a", None, 10.0), ("b", 9000.0, 1.0), ("a", 100.0, 30.0), ("a", 5.0, None)
    ]  # fmt: skip
    assert earlier_power(tmp_path, alike) is None
    for night, (hardware, energy_j, seconds) in enumerate(runs):
        row = {"model": "m", "hardware": hardware, "energy_j": energy_j, "engine_wall_s": seconds}
        schema = pa.schema([(name, pa.string() if name in alike else pa.float64()) for name in row])
        run_id = f"202611{night + 10}T000000Z-0000000"
        pq.write_table(pa.Table.from_pylist([row], schema=schema), table_path(tmp_path, RUN, run_id))
    assert earlier_power(tmp_path, alike) == pytest.approx(10.0)


def test_energy_is_forecast_from_a_run(
    tmp_path: Path, model: Path, known_peaks: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, model, people(10))
    found = planned(path).forecast
    assert found.energy_j is None
    monkeypatch.setattr("batchinfer.plan.forecast.engine.earlier_power", lambda *_: 50.0)
    again = planned(path)
    assert again.forecast.energy_j == pytest.approx(50 * again.forecast.seconds)
    assert "J, if the machine takes as much power as in earlier runs" in text(again)


def test_report_tables_that_cannot_be_read_are_done_without(tmp_path: Path) -> None:
    assert earlier_lengths(tmp_path) is None
    table_path(tmp_path, REQUESTS, "20261110T000000Z-0000000").write_bytes(b"no Parquet")
    narrow = table_path(tmp_path, REQUESTS, "20261111T000000Z-0000000")
    pq.write_table(pa.table({"prompt_tokens": [5]}), narrow)
    assert earlier_lengths(tmp_path) is None
    whole = pa.table({"prompt_tokens": [5], "completion_tokens": [9], "cut": [False]})
    pq.write_table(whole, table_path(tmp_path, REQUESTS, "20261109T000000Z-0000000"))
    found = earlier_lengths(tmp_path)
    assert (found.runs, found.answers.tolist()) == (1, [9])
