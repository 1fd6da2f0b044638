"""Layouts on several devices: fitting ones, the chosen one, and their times compared with published ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.ranks.division import Division
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.devices import devices_by_name
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import hardware_by_name
from batchinfer.pipeline.options import RunOptions
from batchinfer.plan.forecast import engine as engine_module
from batchinfer.plan.forecast import job as job_module
from batchinfer.plan.forecast import layouts as module
from batchinfer.plan.forecast.engine import ForecastEngine, simulated_engine
from batchinfer.plan.forecast.job import JobForecast
from batchinfer.plan.forecast.layouts import LayoutForecast, candidates
from batchinfer.plan.forecast.sharded_model import needs_all_logits, shard_into_stages
from batchinfer.plan.forecast.text import forecast_json
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.plan.simulation.simulator import simulate
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.pipeline.test_pipeline import run as run_job
from tests.batchinfer.plan.forecast.forecasts import planned, text
from tests.batchinfer.test_replicas import pytestmark as two_cores
from tests.examples import first_of
from tests.large_models import hollow_checkpoint
from tests.layout_table import LAYOUTS, LENGTHS, name_of, tokens_per_s
from tests.model_costs import llama_spec
from tests.settings import changed, setting_of

REAL = RunOptions(waves_from_s=float("inf"))
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def llama_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hollow_checkpoint(tmp_path_factory.mktemp("large") / "llama-70b")


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobForecast]:
    """A job of the same model with fewer layers, and its forecast for eight GPUs."""
    folder = tmp_path_factory.mktemp("job")
    wide = hollow_checkpoint(folder / "wide", num_hidden_layers=20, intermediate_size=131_072)
    path = job_of(folder, wide, 24, 20)
    return path, planned(path, hardware="8xh100")


def job_of(folder: Path, model: Path, rows: int, output: int, words: int = 4, **engine: Any) -> Path:
    texts = [{"id": f"r{row}", "text": f"{row} " + "word " * (words + row % 7)} for row in range(rows)]
    sampling = {"max_tokens": output, "ignore_eos": True}
    return write_job(folder, model, texts, sampling=sampling, engine=engine)


def test_several_devices_have_names() -> None:
    one, eight, machines = (devices_by_name(name) for name in ("h100", "8xh100", "2x8xL4"))
    assert (one.count, eight.count, machines.count) == (1, 8, 16)
    assert one.hardware == eight.hardware == hardware_by_name("h100")
    assert eight.name == "8 × NVIDIA H100 80GB HBM3"
    assert machines.name == "2 machines with 8 × NVIDIA L4 each"
    assert eight.link_among(8) == eight.link_among(2) == eight.link
    assert (machines.link_among(4), machines.link_among(16)) == (machines.link, machines.network)
    assert eight.link.bytes_per_s > devices_by_name("8xh100-pcie").link.bytes_per_s
    for wrong in ("0xh100", "9x8xh100", "8xh1000"):
        with pytest.raises(UsageError):
            devices_by_name(wrong)


def test_candidates_leave_no_device_idle_that_could_work() -> None:
    found = [(one.tensor, one.stages) for one in candidates(8)]
    assert found == [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
    assert [one.ranks for one in candidates(7)] == [1, 2, 2, 3, 3, 7, 7]


def test_a_large_model_is_laid_out_on_eight_gpus(laid_out: tuple[Path, JobForecast]) -> None:
    _, found = laid_out
    by_name = {layout.name: layout for layout in found.layouts}
    assert len(by_name) == 10
    first = found.layouts[0]
    assert (first.chosen, first.simulated, first.not_run) == (True, True, None)
    runs = [one for one in found.layouts if one.refused is None and one.not_run is None]
    assert [one.name for one in runs if one.seconds < (first.seconds or 0)] == []
    assert {one.not_run for one in found.layouts} == {None}
    fitting = [one for one in found.layouts if one.refused is None]
    assert all((one.weight_bytes or 0) + (one.kv_bytes or 0) < 80e9 for one in fitting)
    assert (by_name["PP 2, 4 engines"].kv_bytes or 0) > 4e9
    alone = by_name["8 engines"]
    assert alone.refused == "does not fit: weights take 130 GiB, and a device has 74.5 GiB"
    # 69.5 G weights in 2 bytes; the norms are on each rank
    assert by_name["TP 8, 1 engine"].weight_bytes == pytest.approx(69.55e9 * 2 / 8, rel=0.01)
    assert by_name["TP 2, 4 engines"].weight_bytes == pytest.approx(69.55e9, rel=0.01)
    said = text(found)
    assert "NVIDIA H100 80GB HBM3, NVLink at 450 GB/s; expected, and never run on a GPU; bytes are" in said
    assert f"chosen, the fastest that runs: {first.name}: " in said
    assert "8 engines: does not fit: weights take 130 GiB" in said
    assert f"engine: {{tensor_parallel_size: {first.tensor}, pipeline_parallel_size: {first.stages}" in said
    assert "layouts   8 × NVIDIA H100 80GB HBM3" in said
    told = json.loads(json.dumps(forecast_json(found, None)))
    assert told["hardware"] == {"name": "NVIDIA H100 80GB HBM3", "devices": 8, "nodes": 1}
    assert [one["chosen"] for one in told["layouts"]] == [True] + [False] * 9
    assert told["layouts"][-1]["refused"] is not None


def test_the_chosen_layout_runs(laid_out: tuple[Path, JobForecast], monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = laid_out
    first = before.layouts[0]
    options = [(f"engine.{name}", str(value)) for name, value in first.options.items()]
    monkeypatch.setattr(job_module, "layout_forecasts", lambda *_: ())
    found = planned(path, *options, hardware="8xh100")
    assert (before.forecast, found.misfit) == (None, None)
    assert found.forecast.seconds == pytest.approx(first.seconds, rel=0.2)


def test_one_device_and_a_small_model_need_no_rank(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(40))
    assert planned(path, hardware="h100").layouts == ()
    found = planned(path, hardware="4xl4")
    assert found.layouts[0].name == "4 engines"
    wide = next(one for one in found.layouts if one.tensor == 4)
    assert wide.refused is None or "cannot be divided among 4 ranks" in wide.refused


def test_an_invalid_division_is_refused_with_valid_ones(tmp_path: Path) -> None:
    odd = hollow_checkpoint(tmp_path / "odd", num_attention_heads=6, num_key_value_heads=3, hidden_size=768,
                            intermediate_size=1536, num_hidden_layers=3)  # fmt: skip
    found = planned(job_of(tmp_path, odd, 40, 8), hardware="8xl4")
    refused = {one.name: one.refused for one in found.layouts if one.refused is not None}
    assert "6 query heads cannot be divided among 4 ranks" in refused["TP 4, 2 engines"]
    assert "its tensors can be divided among 1" in refused["TP 4, 2 engines"]
    assert "3 layers cannot be divided among 8 stages" in refused["PP 8, 1 engine"]
    assert found.layouts[0].name == "8 engines"


def test_ranks_on_several_machines_are_not_offered(tmp_path: Path) -> None:
    shallow = hollow_checkpoint(tmp_path / "shallow", num_hidden_layers=8)
    found = planned(job_of(tmp_path, shallow, 24, 8), hardware="2x4xh100")
    across = next(one for one in found.layouts if one.tensor == 8)
    assert across.not_run == "all ranks of an engine run on one machine as yet"
    within = next(one for one in found.layouts if (one.tensor, one.stages) == (4, 1))
    assert across.seconds > (within.seconds or 0), "the network is slower than links within a machine"
    first = found.layouts[0]
    assert (first.chosen, first.tensor * first.stages <= 4) == (True, True)


def test_stages_send_over_the_slowest_link_between_them() -> None:
    setting = setting_of(hardware_by_name("h100"))
    divided = shard_into_stages(llama_spec(4, 512, 1408, 8, 4, 64, 32_000), Division(4, 2), setting)
    for name, between in (("8xh100", "link"), ("2x4xh100", "network")):
        devices = devices_by_name(name)
        first, last = (stage.sends for stage in divided.stages(devices, 2, all_logits=False))
        assert (first.link, first.next_link) == (devices.link, getattr(devices, between))
        assert (last.link, last.next_link) == (devices.link, None)


@pytest.mark.usefixtures("known_peaks")
@two_cores
def test_the_forecast_takes_stages_into_account(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(40), sampling={"max_tokens": 9, "ignore_eos": True},
                     engine={"max_num_seqs": 8, "max_num_batched_tokens": 96}, drafts="off")  # fmt: skip
    staged = ("engine.pipeline_parallel_size", "2")
    alone, divided = planned(path), planned(path, staged)
    assert (alone.forecast.waits, divided.layouts) == (None, ())
    assert 0 < divided.forecast.waits < 1
    assert "stages wait " in text(divided)
    assert forecast_json(divided, None)["forecast"]["stage_waits"] == divided.forecast.waits
    assert divided.forecast.run.sampled_tokens == alone.forecast.run.sampled_tokens
    assert divided.forecast.run.steps > 1.5 * alone.forecast.run.steps
    row = run_job(path, REAL, staged).row
    assert row["steps"] == pytest.approx(divided.forecast.run.steps, rel=0.1)
    assert row["forecast_output_tokens"] == row["output_tokens"]
    again = planned(path, staged)
    assert (again.plan.to_run, again.forecast) == (0, None)


@two_cores
def test_ranks_on_a_cpu_share_what_the_cache_may_take(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(60), engine={"kv_memory": "1MiB"})
    for division in ((), (("engine.pipeline_parallel_size", "2"),), (("engine.tensor_parallel_size", "2"),)):
        found = planned(path, *division).memory
        assert 1 << 19 < found.kv_cache <= 1 << 20


@pytest.mark.usefixtures("known_peaks")
@two_cores
def test_tensor_ranks_of_a_cpu_send_each_other_sums(tmp_path: Path, model: Path, quantizations: None) -> None:
    path = write_job(tmp_path, model, people(60), sampling={"max_tokens": 9, "ignore_eos": True})
    alone, divided = planned(path), planned(path, ("engine.tensor_parallel_size", "2"))
    assert (divided.forecast.waits, divided.forecast.run.steps) == (None, alone.forecast.run.steps)
    assert divided.forecast.seconds > (alone.forecast.seconds or 0)
    compared = [[one.quantization for one in found.quantizations] for found in (alone, divided)]
    assert compared == [["none", "int8", "int4"], ["none", "int8"]], "24 inputs are no groups of 32"


@pytest.mark.parametrize(("sections", "all_of_them"), [
    ({}, False),
    ({"sampling": {"stop": ["x"], "max_tokens": 3}}, False),
    ({"sampling": {"temperature": 0.5}}, True),
    ({"sampling": {"logprobs": 1}}, True),
    ({"sampling": {"choice": ["yes", "no"]}}, True),
    ({"sampling": {"repetition_penalty": 1.1}}, True),
    ({"output": {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}, True),
])  # fmt: skip
def test_logits_are_gathered_where_more_than_the_best_is_asked_for(
    tmp_path: Path, model: Path, sections: dict[str, Any], all_of_them: bool
) -> None:
    assert needs_all_logits(load_job(write_job(tmp_path, model, people(1), **sections))) is all_of_them


# Rows, words of their prompts, tokens of their answers, and rows that run at once
WORKS = [(300, 2, 60, 64), (240, 120, 6, 64), (200, 60, 30, 256), (16, 8, 40, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["8xh100", "8xa100-pcie"])
@pytest.mark.parametrize("work", WORKS)
def test_the_chosen_layout_is_the_fastest_of_all_layouts(
    tmp_path: Path, llama_70b: Path, work: tuple[int, ...], hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layout is simulated with all rows."""
    searched = dict[tuple[int, int], float]()
    plain = module._timed

    def timed(fitting: Any, prompts: Any) -> Any:
        for one in fitting:
            engine: ForecastEngine = one.engine
            division = engine.setup.setting.placement.division
            searched[division.tensor, division.stages] = engine.forecast(prompts, 1e9).run.seconds
        return plain(fitting, prompts)

    monkeypatch.setattr(module, "_timed", timed)
    rows, words, output, seqs = work
    path = job_of(tmp_path, llama_70b, rows, output, words, max_num_seqs=seqs)
    chosen = planned(path, hardware=hardware).layouts[0]
    assert len(searched) >= 8
    assert searched[chosen.tensor, chosen.stages] == min(searched.values())
    assert chosen.seconds == pytest.approx(searched[chosen.tensor, chosen.stages], rel=0.02)


class Published(NamedTuple):
    """A published rate: output tokens per second of Llama 70B on `tensor` GPUs."""

    gpus: str
    tensor: int
    quantization: str
    prompt: int
    output: int
    rows: int
    tokens_per_s: float


# TensorRT-LLM 1.0, docs/source/performance/perf-overview.md, Llama 3.3 70B in FP8 on two H100 SXM; and 0.6.1,
# docs/source/performance.md, LLaMA 70B in FP16 on four A100, given a GPU. See docs/measurements/layouts.md.
PUBLISHED = [
    Published("2xh100", 2, "fp8", 128, 128, 3000, 6378),
    Published("2xh100", 2, "fp8", 1000, 1000, 600, 4205),
    Published("2xh100", 2, "fp8", 2048, 128, 600, 762),
    Published("2xh100", 2, "fp8", 5000, 500, 300, 898),
    Published("4xa100", 4, "none", 128, 128, 1280, 4 * 670),
    Published("4xa100", 4, "none", 2048, 128, 120, 4 * 79),
]


@pytest.mark.parametrize("published", first_of([(one,) for one in PUBLISHED[::-1]], 1))
def test_the_simulation_is_near_published_rates(
    tmp_path: Path, llama_70b: Path, published: Published
) -> None:
    coded = {
        "quantization": published.quantization,
        "kv_cache_dtype": "fp8" if published.quantization == "fp8" else "auto",
    }
    seqs = 1280 if published.rows == 1280 else 1024
    path = write_job(tmp_path, llama_70b, people(1), model=coded, engine={"max_num_seqs": seqs})
    job, devices = load_job(path), devices_by_name(published.gpus)
    setup = check_setup(job, state_of(job), MachineFacts(devices.hardware))
    setup = replace(setup, setting=setup.setting.with_placement(division=Division(published.tensor)))
    machine, _ = simulated_engine(job, setup, published.prompt + published.output, devices, learns=False)
    params = SamplingParams(max_tokens=published.output, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(3, 200, (published.rows, published.prompt)).astype(np.int32)
    requests = [Request(row.to_bytes(32, "big"), prompt, params) for row, prompt in enumerate(tokens)]
    run = simulate(machine, requests, {request.key: published.output for request in requests})
    assert published.rows * published.output / run.seconds == pytest.approx(published.tokens_per_s, rel=0.3)


@pytest.mark.parametrize("layout", first_of([(one,) for one in LAYOUTS], 0))
def test_the_table_of_the_page_is_simulated(tmp_path: Path, llama_70b: Path, layout: tuple[int, int]) -> None:
    page, division = (ROOT / "docs/large-models.md").read_text(), Division(*layout)
    row = next(line for line in page.splitlines() if line.startswith(f"| {name_of(division)} | "))
    told = float(row.split("|")[4].strip(" *").replace(",", ""))
    path = write_job(tmp_path, llama_70b, people(1))
    assert tokens_per_s(path, division, *LENGTHS[1], captured=True)[0] == pytest.approx(told, rel=0.005)


def test_names_say_what_a_layout_is() -> None:
    assert LayoutForecast(4, 2, 4, 3).name == "TP 4 × PP 2 × EP 4, 3 engines"
    assert LayoutForecast(1, 1, 1, 1).name == "1 engine"


def test_one_gpu_is_forecast_with_multi_step_decoding(tmp_path: Path, model: Path) -> None:
    """Not with draft heads, a draft model or several ranks."""
    job, devices = load_job(write_job(tmp_path, model, people(1))), devices_by_name("2xh100")
    found = check_setup(job, state_of(job), MachineFacts(devices.hardware))
    room = engine_module.engine_room(job, found, 100)
    cases: list[dict[str, Any]] = [{}, {"division": Division(2)}, {"heads": Mock()}, {"draft_model": Mock()}]
    for changes in cases:
        setup = replace(found, setting=changed(found.setting, **changes))
        with patch.object(
            engine_module,
            "engine_room",
            engine_module.engine_room if "division" in changes else lambda *_: room,
        ):
            machine, _ = simulated_engine(job, setup, 100, devices, learns=False)
        assert machine.repeats is (not changes), changes
