"""The run row, its table, and the retention of older runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.machine.hardware import Hardware
from batchinfer.report.tables import folder, spool
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS, TABLE_FORMAT
from batchinfer.report.tables.details import Machine
from batchinfer.report.tables.meter import Measured, Meter
from batchinfer.report.tables.spool import Spool
from batchinfer.report.tables.tables import RunRow, run_row, versions, write_run
from batchinfer_kernels.cost import Peaks

CAPTURED = (
    "capture_s",
    "graph_bytes",
    "load_free_bytes",
)  # columns that only GPUs fill, in addition to launches
START = datetime(2026, 11, 20, 22, 30, tzinfo=UTC)


@pytest.fixture
def facts() -> RunRow:
    return {
        "run_id": "20261120T223000Z-abcdef",
        "job": "orders",
        "output": "/d/res",
        "started_at": START,
        "finished_at": START + timedelta(seconds=90),
        "exit_code": 0,
        "exit_status": "published",
        "dtype": "float32",
        "ops": {"linear": "torch"},
        "rows": 20,
        "rows_ok": 18,
        "rows_error": 2,
        "error_codes": {"bad_json": 2},
        "engine_s": 12.0,
        "forecast_s": 10.0,
    }


@pytest.fixture
def machine() -> Hardware:
    return Hardware("Test CPU", "cpu", 2, 2**34, {"float32": 1000.0}, 200.0, "measured")


def measured_by(tmp_path: Path, step: Any, request_sample: Any) -> Measured:
    with Meter(tmp_path, "m", machine=Machine(None, Peaks(1000.0, 200.0))) as meter:
        for number in range(4):
            meter.step(step(number))
        meter.request(request_sample(1))
        return meter.finish()


def test_definitions_of_columns_by_hand(
    tmp_path: Path, facts: RunRow, machine: Hardware, step: Any, request_sample: Any
) -> None:
    """Four steps of 0.75 s with 0.25 s between them, 1,000 FLOP and 100 bytes each."""
    row = run_row(facts, machine, measured_by(tmp_path, step, request_sample))
    wall = 4 * 0.75 + 3 * 0.25
    expected = {
        "wall_s": 90.0,
        "engine_wall_s": wall,
        "model_s": 2.0,
        "overhead_s": 1.0,
        "idle_s": 0.75,
        "prompt_tokens_run": 4 * (10 - 2),
        "recomputed_share": 8 / 56,
        "padding_share": 4 / 60,
        "mfu": 4000 / wall / 1000,
        "mbu": 400 / wall / 200,
        "roofline_s": 1.0,
        "roofline_efficiency": 1.0 / wall,
        "step_bound_s": 4.0,
        "prompt_tokens_per_s": 32 / wall,
        "output_tokens_per_s": 5 / wall,
        "total_tokens_per_s": 37 / wall,
        "ttft_p50_s": 2.0,
        "tpot_p99_s": 1.0,
        "itl_p50_s": 1.0,
        "forecast_error": wall / 10 - 1,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert set(row) == set(SCHEMAS[RUN].names)


def test_steps_are_counted_by_launch_mode(
    tmp_path: Path, facts: RunRow, machine: Hardware, step: Any
) -> None:
    """Each mode computes 14 tokens. A CPU captures nothing: its counts are null, never zero."""
    modes: list[LaunchMode | None] = ["full_graph", "full_graph", "piecewise_graph", "full_graph", "eager"]
    with Meter(tmp_path, "r", Machine(None, None)) as meter:
        for number, mode in enumerate(modes):
            several = {"launched_steps": 3 if number < 3 else 1}
            meter.step(
                step(number, launch=mode, capture_s=0.125 * (number == 2), graph_bytes=7 * number, **several)
            )
        loaded = facts | {"load_capture_s": 3.0, "load_graph_bytes": 900, "load_free_bytes": 4000}
        row = run_row(loaded, machine, meter.finish())
    assert [row[f"{mode}_steps"] for mode in LAUNCH_MODES] == [3, 1, 1]
    assert [row[f"{mode}_tokens"] for mode in LAUNCH_MODES] == [42, 14, 14]
    for unit in ("steps", "tokens"):
        shares = [row[f"{mode}_{unit}_share"] for mode in LAUNCH_MODES]
        assert shares == pytest.approx([0.6, 0.2, 0.2])
    assert (row["capture_s"], row["load_capture_s"]) == (0.125, 3.0)
    assert (row["graph_bytes"], row["load_graph_bytes"], row["load_free_bytes"]) == (70, 900, 4000)
    assert row["host_launches"] == 3
    table = pq.read_table(tmp_path / "steps-r.parquet")
    assert table["launched_steps"].to_pylist() == [3, 3, 3, 1, 1]
    assert table["launch"].to_pylist() == modes
    assert table["graph_bytes"].to_pylist() == [0, 7, 14, 21, 28]
    with Meter(tmp_path, "c", Machine(None, None)) as meter:
        meter.step(step(0))
        row = run_row(facts, machine, meter.finish())
    names = [name for name in row if name.endswith(CAPTURED) or name.startswith(LAUNCH_MODES)]
    assert len(names) == 17
    assert {row[name] for name in (*names, "host_launches")} == {None}


@pytest.mark.parametrize(
    ("saved", "known"), [((1.0, 0.5), 1.5), ((None, 0.5), 0.5), ((None, None), None), ((600.0, 15.0), 4.0)]
)
def test_time_saved_by_drafts_is_bounded_by_the_run_or_unknown(
    tmp_path: Path,
    facts: RunRow,
    machine: Hardware,
    step: Any,
    saved: tuple[float | None, ...],
    known: float | None,
) -> None:
    with Meter(tmp_path, "m", machine=Machine(None, Peaks(1000.0, 200.0))) as meter:
        meter.step(step(0, duration_s=2.0))
        for number, seconds in enumerate(saved, 1):
            meter.step(step(number, duration_s=1.0, drafted_tokens=4, drafts_saved_s=seconds))
        row = run_row(facts, machine, meter.finish())
    assert row["drafts_saved_s"] == known


def test_energy_and_cost(
    tmp_path: Path, facts: RunRow, machine: Hardware, step: Any, request_sample: Any
) -> None:
    found = measured_by(tmp_path, step, request_sample) | {"energy_j": 74.0, "gpu_energy_j": 74.0}
    row = run_row(facts | {"price_per_hour": 40.0}, machine, found)
    assert (row["cpu_energy_j"], row["gpu_energy_j"], row["energy_j"]) == (None, 74.0, 74.0)
    assert row["energy_j_per_token"] == 2.0
    assert (row["cost"], row["forecast_engine_cost"]) == (1.0, pytest.approx(40 * facts["forecast_s"] / 3600))
    assert row["engine_cost"] == pytest.approx(40 * row["engine_wall_s"] / 3600)
    free = run_row(facts, machine, measured_by(tmp_path, step, request_sample))
    assert free["energy_j"] is free["energy_j_per_token"] is free["cost"] is None


def test_int8_linear_layers_are_measured_against_their_own_peak(facts: RunRow, machine: Hardware) -> None:
    both = replace(machine, peak_flops={"float32": 1000.0, "int8": 4000.0})
    quantized = facts | {"quantization": "int8", "deterministic": True}
    row = run_row(quantized, both, None)
    assert (row["quantization"], row["deterministic"], row["peak_flops_per_s"]) == ("int8", True, 4000.0)
    assert run_row(facts, both, None)["peak_flops_per_s"] == 1000.0
    assert run_row(quantized, machine, None)["peak_flops_per_s"] is None


def test_unknown_values_are_null_and_never_zero(
    tmp_path: Path, facts: RunRow, step: Any, request_sample: Any
) -> None:
    """With unknown hardware, and in a run without an engine."""
    bare = Hardware("Test CPU", "cpu", 2, None)
    row = run_row(facts, bare, measured_by(tmp_path, step, request_sample))
    unknown = ("mfu", "mbu", "peak_flops_per_s", "peak_bytes_per_s", "datasheet_flops_per_s")
    assert {row[name] for name in unknown} == {None}
    assert row["flops"] == 4000
    row = run_row(facts, None, None)
    assert row["mfu"] is row["steps"] is row["ttft_p50_s"] is None
    with Meter(tmp_path, "m") as meter:
        idle = run_row(facts, None, meter.finish())
    assert idle["steps"] == 0
    assert idle["mfu"] is idle["roofline_s"] is idle["padding_share"] is idle["prompt_tokens_per_s"] is None


def test_the_table_survives_writing_and_reading(tmp_path: Path, facts: RunRow, machine: Hardware) -> None:
    row = run_row(facts, machine, None)
    path = write_run(tmp_path / "res-report", row)
    assert path.name == "run-20261120T223000Z-abcdef.parquet"
    back = pq.read_table(path)
    assert back.schema.equals(SCHEMAS[RUN])
    assert back.schema.metadata[b"batchinfer.format"] == str(TABLE_FORMAT).encode()
    found = back.to_pylist()[0]
    assert dict(found.pop("error_codes")) == {"bad_json": 2}
    assert dict(found.pop("versions")) == versions()
    assert dict(found.pop("ops")) == {"linear": "torch"}
    assert found == {name: row[name] for name in found}


def test_a_row_must_name_exactly_the_columns(tmp_path: Path, facts: RunRow) -> None:
    row = run_row(facts, None, None)
    with pytest.raises(ValueError, match="surprise"):
        write_run(tmp_path, row | {"surprise": 1})
    row.pop("mfu")
    with pytest.raises(ValueError, match="mfu"):
        write_run(tmp_path, row)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rename_leaves_the_older_table(
    tmp_path: Path, facts: RunRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, run_row(facts, None, None))
    before = path.read_bytes()

    def fail(*paths: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spool.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_run(tmp_path, run_row(facts, None, None) | {"job": "other"})
    assert path.read_bytes() == before


def test_details_of_the_newest_runs_are_kept_and_every_run_row(tmp_path: Path) -> None:
    ids = [folder.new_run_id(START + timedelta(days=day)) for day in range(13)]
    for run_id in ids:
        for table in ("run", "steps", "requests", "rows", "experts", "activities"):
            folder.table_path(tmp_path, table, run_id).touch()
    (tmp_path / "steps-2019.parquet").touch()  # a file of another program
    gone = folder.prune(tmp_path)
    assert len(gone) == 15
    assert len(list(tmp_path.glob("run-*"))) == 13
    for table in ("steps", "requests", "rows", "experts", "activities"):
        kept = sorted(p.name for p in tmp_path.glob(f"{table}-*Z-*"))
        assert kept == [f"{table}-{run_id}.parquet" for run_id in ids[-folder.KEPT_DETAILS :]]
    assert folder.prune(tmp_path) == []
    assert (tmp_path / "steps-2019.parquet").exists()


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [folder.new_run_id(START + timedelta(microseconds=n * 100)) for n in range(50)]
    assert ids == sorted(ids)
    assert folder.new_run_id(START) != folder.new_run_id(START)


def test_leftovers_of_a_killed_run_are_swept(tmp_path: Path) -> None:
    path = folder.table_path(tmp_path, "steps", folder.new_run_id())
    killed = Spool(path, SCHEMAS[RUN])
    (tmp_path / "notes.tmp").touch()
    assert [p.name for p in folder.sweep(tmp_path)] == [f"{path.name}.tmp"]
    assert [p.name for p in tmp_path.iterdir()] == ["notes.tmp"]
    killed.abort()


def test_a_writer_alongside_another_run_removes_no_files(tmp_path: Path) -> None:
    """Runs of one job for two dates share the folder."""
    lock = tmp_path / "report.lock"
    with folder.lock_for_writing(tmp_path, lock):
        theirs = Spool(folder.table_path(tmp_path, "steps", folder.new_run_id()), SCHEMAS[RUN])
        with folder.lock_for_writing(tmp_path, lock):
            assert list(tmp_path.glob("steps-*"))
    with folder.lock_for_writing(tmp_path, lock):
        assert not list(tmp_path.glob("steps-*"))
    theirs.abort()
