"""`batchinfer plan` for another machine and as JSON, with prefixes, context and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.machine.datasheet import NAMES, datasheet
from batchinfer.machine.hardware import Hardware, hardware_by_name
from batchinfer.plan.forecast.job import PREFIXES_SHOWN
from batchinfer.plan.forecast.text import forecast_json
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.plan.forecast.forecasts import planned, runs_on, text
from tests.batchinfer.wrong_jobs import CliOf


def test_a_job_is_forecast_for_a_machine_that_is_not_here(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(40), sampling={"max_tokens": 20, "ignore_eos": True})
    slow, fast = planned(path, hardware="l4"), planned(path, hardware="h100")
    for found, name in ((slow, "NVIDIA L4"), (fast, "NVIDIA H100 80GB HBM3")):
        assert found.setting.endswith(f"on {name}")
        assert found.forecast.times.basis == "declared"
    assert slow.forecast.run.sampled_tokens == fast.forecast.run.sampled_tokens == 800
    assert (slow.forecast.seconds or 0) > (fast.forecast.seconds or 0) > 0
    write_job(tmp_path, model, engine={"device": "cuda"})
    assert planned(path, hardware="H100").forecast is not None, "there need be no GPU here"


def test_every_name_is_that_of_a_datasheet() -> None:
    for name, gpu in NAMES.items():
        found = hardware_by_name(name)
        assert found.memory_bytes == datasheet(gpu).memory_bytes
        assert found.peaks("float16") is not None
        assert hardware_by_name(gpu) == found


def test_an_unknown_machine_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"unknown GPU 'h1000'; it can be t4, .*h100, "):
        hardware_by_name("h1000")


def test_shared_prefixes_are_a_tree(tmp_path: Path, model: Path) -> None:
    """All rows share the system prompt. Half of them share a text, the others another one."""
    texts = (
        "a long winter's tale of snow and ice that everybody knows " * 3,
        "the rules of the game are simple " * 5,
    )
    rows = [{"id": f"r{i}", "text": texts[i % 2] + f" {i}"} for i in range(20)]
    found = planned(write_job(tmp_path, model, rows))
    roots = [node for node in found.prefixes if node.parent is None]
    assert len(roots) == 1
    assert roots[0].users == 20
    below = [node for node in found.prefixes if node.parent == roots[0].node]
    assert [node.users for node in below][:2] == [10, 10]
    assert all(node.saved_tokens == node.own_tokens * (node.users - 1) for node in found.prefixes)
    assert sum(node.saved_tokens for node in found.prefixes) <= found.plan.shared_prefix_tokens
    assert len(found.prefixes) <= 2 * PREFIXES_SHOWN
    said = text(found)
    assert f"tree      {roots[0].own_tokens} tokens shared by 20 rows: saves" in said
    assert f"            {below[0].own_tokens} tokens more shared by 10 rows: saves" in said


def test_rows_that_share_nothing_have_no_tree(tmp_path: Path, model: Path) -> None:
    found = planned(write_job(tmp_path, model, people(1)))
    assert found.prefixes == []
    assert forecast_json(found, None)["prefixes"] == []


def test_rows_over_the_context_are_counted(tmp_path: Path, model: Path) -> None:
    rows = [*people(10), {"id": "long", "text": "word " * 400}]
    path = write_job(tmp_path, model, rows, model={"max_model_len": 128}, on_error={"max_error_rate": 0.5})
    found = planned(path)
    assert (found.context, found.rows_over) == (128, 1)
    assert "context   1 row longer than 128 tokens" in text(found)
    assert forecast_json(found, None)["context"] == {"tokens": 128, "rows_over": 1}
    write_job(tmp_path, model, model={"max_model_len": 128}, prompt={"truncate": "left"})
    cut = planned(path)
    assert (cut.rows_over, cut.plan.error_rows) == (None, 0)


def test_a_job_that_does_not_fit(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Hardware("a GPU", "cuda", None, 1 << 16, {"float32": 1e12, "bfloat16": 1e12}, 1e11, "datasheet")
    runs_on(monkeypatch, tiny)
    found = planned(write_job(tmp_path, model, people(5)), hardware=tiny)
    assert (found.memory, found.forecast) == (None, None)
    assert found.misfit is not None
    assert "memory    does not fit: the KV cache of the longest row" in text(found)
    assert forecast_json(found, None)["misfit"] == found.misfit


def test_duckdb_reads_the_forecasts_of_many_jobs(tmp_path: Path, model: Path, cli_of: CliOf) -> None:
    rows: list[Any] = [*people(30), "{not json"]
    path = write_job(tmp_path, model, rows, on_error={"max_error_rate": 0.5}, deadline="2030-01-01T06:00")
    plans, run = tmp_path / "plans.jsonl", cli_of()
    for options in ((), ("--sample", "20")):
        ended = run("plan", path, "--json", "--hardware", "a100", *options)
        with plans.open("a") as file:
            file.write(ended.out)
    told = [json.loads(line) for line in plans.read_text().splitlines()]
    assert [one["exit_code"] for one in told] == [0, 0]
    launches = told[0]["forecast"]["launches"].values()
    assert sum(launch["steps"] for launch in launches) == told[0]["forecast"]["steps"]
    found = duckdb.sql(f"SELECT job, to_run, forecast.engine_s FROM read_json('{plans}')").fetchall()
    assert found == [(one["job"], one["to_run"], one["forecast"]["engine_s"]) for one in told]
