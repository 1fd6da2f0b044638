"""Runs as input of the page: tables that a meter wrote from made-up samples."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from batchinfer.core.request import Request
from batchinfer.core.samples import LAUNCH_MODES
from batchinfer.core.sampling import SamplingParams
from batchinfer.machine.hardware import Hardware
from batchinfer.report.history import HISTORY, history_sql
from batchinfer.report.page.reported import ReportedRun, find_run
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.details import Machine
from batchinfer.report.tables.folder import tables
from batchinfer.report.tables.meter import Meter
from batchinfer.report.tables.tables import run_row, write_run
from batchinfer.verbs.history import add_report_view
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.report.conftest import make_request, make_step
from tests.model_costs import llama_cost

RUN_ID = "20261120T223000Z-abcdef"
STARTED = datetime(2026, 11, 20, 22, 30, tzinfo=UTC)
FLOPS, BANDWIDTH = 180e9, 33e9
MACHINE = Hardware("AMD EPYC", "cpu", 2, 24 << 30, {"bfloat16": FLOPS}, BANDWIDTH, "measured")


def prompted(number: int, requests: int) -> Request:
    """Return a request. All of them share 64 tokens, and eight consecutive ones share 96."""
    shares = 0 if number == requests - 1 else 64 if number % 8 == 7 else 96
    return Request(number.to_bytes(32, "big"), np.ones(100 + number % 97, np.int32), SamplingParams(), shares)


def write_samples(
    folder: Path, run_id: str, steps: int, requests: int, peaks: Peaks | None, gpu: bool = False
) -> Any:
    """Write prefill, decode and mixed steps and requests of many lengths. Return the meter's results."""
    meter = Meter(folder, run_id, Machine(llama_cost(2, 64, 128, 4, 2, 16, 256, 2, 2), peaks))
    meter.share_prefixes()
    meter.record_order([prompted(number, requests) for number in range(requests)])
    for number in range(steps):
        prefill, decode = (64, 0) if number < steps // 4 else (16 * (number % 3), 32 + number % 7)
        tokens = prefill + decode
        meter.step(
            make_step(
                number, started_s=number * 0.02, duration_s=0.015 + 0.004 * (number % 5) / 5, model_s=0.012,
                prefill_tokens=prefill, decode_tokens=decode, recomputed_tokens=0, running=20 + number % 30,
                blocks_used=40 + number % 50, blocks_total=100,
                flops=tokens * 20_000_000, roofline_s=0.008, bytes=200_000_000 + tokens * 1000,
                launch=LAUNCH_MODES[number % 3] if gpu else None, capture_s=0.001 if gpu else None,
            )
        )  # fmt: skip
    for number in range(requests):
        began = number * 0.001
        meter.request(
            make_request(
                number, prompt_tokens=100 + number % 97, completion_tokens=5 + number % 61, queued_s=0.0,
                cached_tokens=(96 if number % 8 else 64) if number else 0,
                scheduled_s=began, first_token_s=began + 0.05, finished_s=began + 0.5,
            )
        )  # fmt: skip
    return meter.finish()


def write_tables(
    folder: Path,
    steps: int = 400,
    requests: int = 300,
    peaks: bool = True,
    gpu: bool = False,
    run_id: str = RUN_ID,
    meaningless: Sequence[str] = (),
    **facts: Any,
) -> None:
    """Write the tables of one run. `facts`: columns of the run table; the `meaningless` ones become null."""
    known = {
        "job": "orders", "output": "/d/res", "exit_code": 0, "exit_status": "published", "dtype": "bfloat16",
        "rows": requests + 15, "rows_ok": requests, "rows_error": 15,
        "error_codes": {"bad_json": 10, "prompt_too_long": 5},
        "duplicate_rows": 0, "reused_requests": 0, "duplicate_saved_tokens": 0, "duplicate_saved_output_tokens": 0,
        "startup_s": 0.5, "ingest_s": 1.25, "plan_s": 0.05, "load_s": 2.0, "engine_s": 9.0, "publish_s": 0.5,
        "close_s": 0.2,
        "other_s": 0.1, "forecast_s": 10.0,
        "forecast_steps": 500, "forecast_output_tokens": 12_000, "forecast_mfu": 0.5, "forecast_basis": "measured",
        "forecast_answers_from": 2,
    }  # fmt: skip
    measured = None
    if steps:
        limits = Peaks(FLOPS, BANDWIDTH) if peaks else None
        measured = write_samples(folder, run_id, steps, requests, limits, gpu)
    times = {"started_at": STARTED, "finished_at": STARTED + timedelta(seconds=13.6)}
    row = run_row(
        {"run_id": run_id} | times | known | facts, MACHINE if peaks else None, measured, meaningless
    )
    write_run(folder, row)


def read_run(folder: Path, results: pa.Table | None = None, notice: str = "") -> ReportedRun:
    """Return the newest run of a report folder."""
    database = duckdb.connect()
    for name, schema in SCHEMAS.items():
        if files := tables(folder, name):
            add_report_view(database, name, files)
        else:
            database.register(name, schema.empty_table())
    database.execute(f'CREATE VIEW "{HISTORY}" AS {history_sql(RUN)}')
    if results is not None:
        database.register("results", results)
    row = find_run(database, None, "")
    assert row is not None
    return ReportedRun(database, row, results is not None, notice)


def error_rows(names: dict[str, list[str | None]]) -> pa.Table:
    """Return results with error rows, given their ids by error code."""
    rows = [
        {"row_id": number, "custom_id": name, "error_code": code, "error_message": "secret prompt text"}
        for number, (code, name) in enumerate((code, name) for code, ids in names.items() for name in ids)
    ]
    return pa.Table.from_pylist(rows)
