"""The summary at the end of a run."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core import wording
from batchinfer.core.text import json_line
from batchinfer.report.summary import off, summary
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.tables import run_row

START = datetime(2026, 11, 20, 22, 30, tzinfo=UTC)


def full_row(**changes: Any) -> dict[str, Any]:
    facts = {
        "run_id": "20261120T223000Z-abcdef",
        "job": "orders",
        "output": "results/orders",
        "started_at": START,
        "finished_at": START + timedelta(seconds=112),
        "exit_code": 0,
        "exit_status": "published",
        "versions": {"python": "3.11.0"},
        "dtype": "bfloat16",
        "rows": 2400,
        "rows_ok": 2388,
        "rows_error": 12,
        "error_codes": {"bad_json": 3, "prompt_too_long": 5, "bad_utf8": 2, "missing_prompt": 2},
        "duplicate_rows": 78,
        "reused_requests": 10,
        "duplicate_saved_tokens": 4500,
        "ingest_s": 1.25,
        "plan_s": 0.05,
        "load_s": 2.0,
        "engine_s": 90.0,
        "publish_s": 0.5,
        "parent_peak_rss_bytes": 310 * 2**20,
        "worker_peak_rss_bytes": int(1.25 * 2**30),
        "forecast_s": 95.0,
        "forecast_output_tokens": 82_000,
    }
    engine = {
        "computed_requests": 2300,
        "hardware": "AMD EPYC",
        "device": "cpu",
        "peak_source": "measured",
        "prompt_tokens_run": 1_107_000,
        "prefix_saved_tokens": 2_500_000,
        "output_tokens": 80_400,
        "prompt_tokens_per_s": 12_300.0,
        "output_tokens_per_s": 893.3,
        "total_tokens_per_s": 13_193.3,
        "steps": 5000,
        "engine_wall_s": 90.0,
        "forecast_error": 90 / 95 - 1,
        "overhead_s": 2.7,
        "idle_s": 0.9,
        "padding_share": 0.004,
        "recomputed_share": 0.0,
        "mfu": 0.302,
        "mbu": 0.118,
        "roofline_efficiency": 0.413,
        "ttft_p50_s": 31.0,
        "ttft_p99_s": 83.0,
        "tpot_p50_s": 0.0123,
        "tpot_p99_s": 0.025,
    }
    return run_row(facts, None, None) | engine | changes


def test_a_published_run() -> None:
    report = Path("results/orders-report/run-20261120T223000Z-abcdef.parquet")
    assert summary(full_row(), report) == "\n".join(
        [
            "orders: published after 1 min 52 s",
            "  rows     2,388 ok, 12 error rows (0.5%)  prompt_too_long 5, bad_json 3, bad_utf8 2, …",
            "  work     2,300 computed now, 10 reused from earlier runs, 78 served as duplicates",
            "  tokens   1.11M prompt run, 80.4k output, 2.50M saved by shared prefixes, 4.50k by duplicates",
            "  speed    12.3k prompt tok/s + 893 output tok/s = 13.2k tok/s",
            "  latency  TTFT 31 s / 1 min 23 s, TPOT 12.3 ms / 25 ms  (p50 / p99)",
            "  limit    roofline 41% (MFU 30%, MBU 12%) of measured peaks: AMD EPYC, bfloat16",
            "  lost     padding 0.4%, recomputation 0%, overhead 3.0%, idle 1.0%",
            "  time     ingest 1.25 s, plan 50 ms, load 2 s, engine 1 min 30 s, publish 500 ms",
            "  forecast engine 1 min 35 s, took 1 min 30 s (-5.3%); output 82k tokens, were 80.4k",
            "  memory   parent 310 MiB at its peak, worker 1.25 GiB at its peak",
            "  results  results/orders/*.parquet",
            "  report   results/orders-report/run-20261120T223000Z-abcdef.parquet",
            "  page     batchinfer report results/orders",
            "  next     batchinfer show results/orders",
        ]
    )


def test_arithmetic_other_than_the_default_is_named() -> None:
    text = summary(full_row(quantization="int8", deterministic=True))
    assert "AMD EPYC, bfloat16 with int8 weights, deterministic\n" in text
    assert "bfloat16\n" in summary(full_row(quantization="none", deterministic=False))


def test_on_a_gpu_it_says_how_steps_were_launched() -> None:
    launched = {"full_graph_steps": 4000, "piecewise_graph_steps": 900, "eager_steps": 100}
    text = summary(full_row(**launched, load_capture_s=12.0, capture_s=0.25))
    assert "\n  launched steps launched as one graph 80%, as graphs of pieces 18%, an operator" in text
    assert "captures took 12 s in loading, 250 ms in steps\n" in text
    assert "at once" not in text
    several = summary(full_row(**launched, steps=5000, host_launches=2000))
    assert "an operator at a time 2.0%, 2.50 at once on average\n" in several


def test_unknown_hardware_names_the_cure() -> None:
    text = summary(full_row(mfu=None, mbu=None, roofline_efficiency=None))
    assert "unknown hardware (AMD EPYC, bfloat16): run `batchinfer doctor --measure`" in text
    assert "MFU" not in text


def test_an_interrupted_run_says_how_to_carry_on() -> None:
    text = summary(full_row(exit_code=130, exit_status="interrupted", rows_ok=388))
    assert text.startswith("orders: interrupted (exit code 130) after")
    assert "2,000 not done yet" in text
    assert "not published" in text
    assert "finished answers are kept:" in text


def test_a_run_that_had_nothing_to_do_is_short() -> None:
    facts = {"run_id": "r", "job": "orders", "output": "res", "started_at": START, "exit_code": 0}
    facts |= {"finished_at": START + timedelta(seconds=0.4), "exit_status": "already published"}
    text = summary(run_row(facts, None, None))
    assert len(text.splitlines()) == 3
    assert "–" not in text


def test_the_next_command_can_be_pasted_whatever_the_path() -> None:
    last = summary(full_row(output="it's $HOME/x")).splitlines()[-1]
    words = shlex.split(last)
    assert words == ["next", "batchinfer", "show", "it's $HOME/x"]


def test_labels_are_counted_next_and_errors_shown() -> None:
    last = summary(full_row(), labels=True).splitlines()[-1]
    assert shlex.split(last)[-1] == "select label, count(*) from results group by all order by 2 desc"
    assert "batchinfer show results/orders --errors" in summary(full_row(exit_code=65)).splitlines()[-1]


@given(st.sets(st.sampled_from(SCHEMAS[RUN].names)))
def test_no_unknown_value_breaks_the_summary(unknown: set[str]) -> None:
    needed = {"job", "output", "run_id", "started_at", "finished_at", "wall_s"}
    row = full_row(**dict.fromkeys(unknown - needed))
    text = summary(row)
    assert len(text.splitlines()) <= 15
    assert "None" not in text
    assert json.loads(json_line(row))["job"] == "orders"


def test_json_is_one_line_with_every_column() -> None:
    text = json_line(full_row())
    assert "\n" not in text
    back = json.loads(text)
    assert list(back) == SCHEMAS[RUN].names
    assert back["started_at"] == "2026-11-20T22:30:00+00:00"
    assert back["error_codes"]["bad_json"] == 3
    assert back["mfu"] == 0.302
    assert back["itl_p50_s"] is None


def test_json_refuses_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_line({"mfu": float("nan")})
    with pytest.raises(TypeError, match="set"):
        json_line({"mfu": {1}})


@pytest.mark.parametrize(("shown", "expected"), [
    (wording.short_number(None), "–"),
    (wording.short_number(0), "0"),
    (wording.short_number(950), "950"),
    (wording.short_number(999.7), "1.00k"),
    (wording.short_number(12_345), "12.3k"),
    (wording.short_number(1_200_000), "1.20M"),
    (wording.short_number(0.5), "0.50"),
    (wording.percent(0), "0%"),
    (wording.percent(0.005), "0.5%"),
    (wording.percent(0.41), "41%"),
    (wording.percent(1.0), "100%"),
    (wording.seconds(0), "0 ms"),
    (wording.seconds(0.0123), "12.3 ms"),
    (wording.seconds(0.9999), "1.00 s"),
    (wording.seconds(59.97), "1 min 0 s"),
    (wording.seconds(7530), "2 h 5 min"),
    (wording.rough_duration(0.2), "1 s"),
    (wording.rough_duration(61), "1 min"),
    (wording.rough_duration(3599), "59 min 59 s"),
    (wording.rough_duration(7200), "2 h 0 min"),
    (wording.count(2388), "2,388"),
    (off(-0.053), "-5.3%"),
    (off(0.42), "+42.0%"),
    (off(2.124), "3.12 times the forecast"),
    (off(89.967), "91 times the forecast"),
])  # fmt: skip
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


def test_cost_and_energy_are_shown_if_known() -> None:
    assert "  cost" not in summary(full_row(), None)
    text = summary(full_row(cost=0.75, price_per_hour=2.5, energy_j=12_300.0, energy_j_per_token=0.25), None)
    assert "0.75 at 2.5 an hour; 12.3kJ while the engine ran, 0.25 J a token" in text
