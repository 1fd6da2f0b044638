"""Tests the report of a real engine's run: its tables agree, and its parts add up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.report.tables.device_time import LOSSES
from batchinfer.report.tables.folder import tables
from tests.batchinfer.measured_run import ROWS
from tests.batchinfer.wrong_jobs import FAKE, CliOf, Command, Place

Table = Callable[[str], list[dict[str, Any]]]


def reader(place: Place) -> Table:
    """Return a function that queries the tables of a place's only run."""
    report = place.results.with_name("res-report")
    database = duckdb.connect()
    for name in ("run", "steps", "requests", "phases", "buckets", "prefixes", "rows", "activities"):
        (file,) = tables(report, name)
        database.execute(f"CREATE VIEW {name} AS FROM '{file}'")
    return lambda sql: database.sql(sql).to_arrow_table().to_pylist()


@pytest.fixture(scope="module")
def table(measured: Place) -> Table:
    return reader(measured)


def test_the_wall_is_split_whole(table: Table) -> None:
    (run,) = table("FROM run")
    parts = [run[f"wall_{part}_s"] for part in ("load", "input", "device", "host", "output")]
    assert all(part is not None and part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(run["wall_s"], rel=0.01)
    assert run["wall_s"] == pytest.approx((run["finished_at"] - run["started_at"]).total_seconds(), rel=0.01)
    assert run["wall_device_s"] == pytest.approx(table("SELECT sum(model_s) AS s FROM steps")[0]["s"])


def test_each_process_is_reported_from_its_start(table: Table) -> None:
    """The command until it writes its tables; the engine and the render workers before the plan exists."""
    (run,) = table("FROM run")
    own = table("FROM activities WHERE process = 'command' ORDER BY from_s")
    assert own[0]["activity"] == "starting"
    assert [row["activity"] for row in own if row["activity"] in ("reading", "planning")] == [
        "reading",
        "planning",
    ]
    assert sum(row["until_s"] - row["from_s"] for row in own) == pytest.approx(run["wall_s"], abs=0.5)
    engine = table("FROM activities WHERE process = 'engine 0' ORDER BY from_s")
    told = [
        row["activity"] for row in engine if row["activity"] != "waiting for the plan"
    ]  # if it is there first
    assert told == ["starting", "loading", "getting ready", "computing"]
    assert [row["from_s"] for row in engine[1:]] == [row["until_s"] for row in engine[:-1]]
    planned = next(row["from_s"] for row in own if row["activity"] == "planning")
    assert engine[0]["from_s"] < planned < engine[-1]["from_s"]
    reader = table("FROM activities WHERE process = 'reader 0' ORDER BY from_s")
    assert [row["activity"] for row in reader] == ["starting", "reading rows"]
    assert own[0]["from_s"] < reader[0]["from_s"] < reader[1]["until_s"] <= planned + 0.5
    causes = [run[f"idle_{cause}_s"] for cause in ("input", "load", "plan", "tail", "publish")]
    assert run["idle_devices_s"] == pytest.approx(sum(causes))
    assert run["idle_devices_s"] < run["wall_s"]


def test_the_device_is_split_whole(table: Table) -> None:
    (run,) = table("FROM run")
    parts = [run[f"device_{part}_s"] for part in ("roofline", "padding", "recomputation")]
    parts += [run[f"device_{part}_loss_s"] for part in LOSSES]
    assert sum(parts) == pytest.approx(run["wall_device_s"], rel=0.01)
    assert run["device_roofline_s"] == pytest.approx(run["roofline_s"], rel=1e-6)
    assert run["device_padding_s"] == run["device_recomputation_s"] == 0


def test_requests_share_the_device_time(table: Table) -> None:
    (run,) = table("FROM run")
    (sums,) = table(
        "SELECT sum(device_s) AS device_s, sum(ran_device_s) AS ran_device_s, sum(flops) AS flops, "
        "sum(bytes) AS bytes, sum(roofline_s) AS roofline_s, sum(rows) AS rows FROM requests"
    )
    assert sums["device_s"] == pytest.approx(run["model_s"], rel=1e-3)
    assert sums["ran_device_s"] == pytest.approx(run["model_s"], rel=1e-3)
    assert (sums["flops"], sums["rows"]) == (run["flops"], run["rows"])
    assert sums["bytes"] == pytest.approx(run["bytes_moved"], rel=1e-3)
    assert sums["roofline_s"] == pytest.approx(run["roofline_s"], rel=1e-3)


@pytest.mark.parametrize("name", ["phases", "buckets"])
def test_phases_and_buckets_add_up_to_the_run(table: Table, name: str) -> None:
    (run,), rows = table("FROM run"), table(f"FROM {name}")
    assert sum(row["device_s"] for row in rows) == pytest.approx(run["model_s"], rel=1e-3)
    assert sum(row["engine_s"] for row in rows) == pytest.approx(run["engine_wall_s"], rel=1e-3)
    assert sum(row["flops"] for row in rows) == run["flops"]
    for share in ("mfu", "mbu", "roofline_efficiency"):
        mean = sum(row[share] * row["engine_s"] for row in rows) / run["engine_wall_s"]
        assert mean == pytest.approx(run[share], rel=0.01)
    if name == "phases":
        assert sum(row["prompt_tokens"] for row in rows) == run["prompt_tokens_run"]
        assert {row["phase"] for row in rows} <= {"prefill", "decode", "mixed"}
    else:
        assert sum(row["rows"] for row in rows) == run["rows"]
        assert all(row["most_prompt_tokens"].bit_count() == 1 for row in rows)


def test_the_shared_prefix_saves_time(table: Table) -> None:
    (run,), prefixes = table("FROM run"), table("FROM prefixes ORDER BY saved_tokens DESC")
    best = prefixes[0]
    assert (best["users"], best["parent"]) == (ROWS, None)
    assert best["saved_tokens"] == best["tokens"] * (ROWS - 1) > 0
    saved = run["prefix_saved_tokens"]  # a token or two also with rows that do not stand next to one another
    assert 0.95 * saved < sum(row["cached_tokens"] for row in prefixes) <= saved
    (first,) = table(f"SELECT * FROM requests WHERE key = '{best['first_key']}'")
    assert first["cached_tokens"] == 0
    assert first["device_s"] < first["ran_device_s"]
    (others,) = table("SELECT min(device_s - ran_device_s) AS s FROM requests WHERE cached_tokens > 0")
    assert others["s"] >= 0


def test_metering_reports_its_own_cost(table: Table) -> None:
    (run,) = table("FROM run")
    (steps,) = table("SELECT sum(metering_s) AS s FROM steps")
    assert 0 < steps["s"] < run["metering_s"] < run["wall_s"]


def test_without_peaks_and_without_a_step(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unknown values are null, and known ones still add up."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run: Command = cli_of(FAKE)
    assert run("run", place.folder / "job.yaml", "-q").code == 0
    read = reader(place)
    (row,) = read("FROM run")
    assert row["device_roofline_s"] is row["device_other_loss_s"] is None
    parts = [row[f"wall_{part}_s"] for part in ("load", "input", "device", "host", "output")]
    assert sum(parts) == pytest.approx(row["wall_s"], rel=0.01)
    (phase,) = read("FROM phases")
    assert (phase["mfu"], phase["roofline_s"], phase["steps"]) == (None, None, row["steps"])
    assert read("SELECT sum(device_s) AS s FROM requests")[0]["s"] == pytest.approx(row["model_s"])
