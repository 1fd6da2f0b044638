"""The page without a browser: numbers, size, omitted sections, and texts that try to inject markup."""

from __future__ import annotations

import re
import shutil
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.samples import LAUNCH_MODES
from batchinfer.report.page.activities import idle_text
from batchinfer.report.page.document import MARK, page, prose
from batchinfer.report.page.lengths import MOST_BARS, bin_edges
from batchinfer.report.page.overview import heading, tiles, work
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.prefix_tree import MOST_NODES
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.roofline import MOST_POINTS
from batchinfer.report.page.timeline import MOST_SEGMENTS
from batchinfer.report.tables.activities import Activity, write_activities
from batchinfer.report.tables.columns.declared import EXPERTS, ROWS, SCHEMAS
from batchinfer.report.tables.tables import RunRow
from tests.batchinfer.report.parsed_page import ParsedPage
from tests.batchinfer.report.reported_runs import RUN_ID, error_rows, read_run, write_tables

# options of charts that name a column
NAMING = ("x", "from", "y", "by", "size", "category", "level", "part", "value", "share", "node", "parent")
HOSTILE = [
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "' onmouseover='alert(3)",
    "\u202egnp.exe\x1b[31m",
    "</table></details><!--",
    "x" * 5000,
]
IDS = {"bad_json": [*HOSTILE, None, "r7", "r8", "r9"], "prompt_too_long": [f"long {i}" for i in range(5)]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_tables(folder, job=HOSTILE[0], model=HOSTILE[1], output="/d/" + HOSTILE[2])
    return folder


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a few steps. Tests change copies of it."""
    folder = tmp_path_factory.mktemp("short")
    write_tables(folder, steps=60, requests=50)
    return folder


@pytest.fixture
def copy(short_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(short_run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> ReportedRun:
    return read_run(folder)


@pytest.fixture(scope="module")
def row(whole: ReportedRun) -> RunRow:
    return whole.row


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return page(read_run(folder, error_rows(IDS), notice=HOSTILE[1]))


@pytest.fixture(scope="module")
def parsed(text: str) -> ParsedPage:
    return ParsedPage(text)


def test_charts_name_tables_and_columns_that_are_there(parsed: ParsedPage) -> None:
    assert len(parsed.charts) >= 10
    assert len(parsed.ids) == len(set(parsed.ids))
    for table, chart in parsed.charts:
        columns = set(parsed.tables[table].columns)
        named = [chart[name] for name in NAMING if name in chart]
        named += chart.get("bars", [])
        named += [name for line in chart.get("lines", []) for name in (line["y"], *line.get("band", []))]
        assert set(named) <= columns
        assert parsed.tables[table].rows


def test_output_tokens_are_equal_in_all_tables(whole: ReportedRun, parsed: ParsedPage) -> None:
    """A regression: decode steps compute fewer tokens, since an answer's first token comes with its prompt."""
    counts = {"output_tokens": 13_458, "decode_tokens_run": 11_215}
    work_table = work(replace(whole, row=whole.row | counts)).table
    assert work_table is not None
    assert [line[1] for line in work_table.rows if line[0] == "output tokens"] == [13_458]
    assert "work-table" in parsed.tables


def test_links_lead_to_sections(parsed: ParsedPage) -> None:
    links = [attributes["href"] for tag, attributes in parsed.tags if tag == "a"]
    assert links
    assert all(link is not None and link.removeprefix("#") in parsed.ids for link in links)


def test_the_timeline_adds_up_to_the_run(row: RunRow, parsed: ParsedPage) -> None:
    table = parsed.tables["throughput-table"]
    spans = [
        until - start for start, until in zip(table.column("from_s"), table.column("until_s"), strict=True)
    ]
    for column, total in (
        ("prompt_tokens_per_s", "prompt_tokens_run"),
        ("decode_tokens_per_s", "decode_tokens_run"),
    ):
        tokens = sum(rate * span for rate, span in zip(table.column(column), spans, strict=True))
        assert tokens == pytest.approx(row[total])
    assert sum(table.column("steps")) == row["steps"]
    assert sum(spans) == pytest.approx(row["engine_wall_s"])
    assert 2 < len(table.rows) <= MOST_SEGMENTS


def test_engines_of_one_run_follow_one_another(copy: Path) -> None:
    (file,) = copy.glob("steps-*.parquet")
    steps = pq.read_table(file)
    again = steps.set_column(
        steps.column_names.index("engine"), "engine", pa.array([1] * len(steps), pa.int64())
    )
    pq.write_table(pa.concat_tables([steps, again]), file)
    table = ParsedPage(page(read_run(copy))).tables["kv-table"]
    assert sum(table.column("steps")) == 120
    times = table.column("until_s")
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2 * (59 * 0.02 + 0.015 + 0.004 * 4 / 5))


def test_bands_hold_their_medians(parsed: ParsedPage) -> None:
    for name, column in (("batch", "running"), ("kv", "kv")):
        table = parsed.tables[f"{name}-table"]
        spread = zip(*(table.column(f"{column}_{end}") for end in ("min", "median", "max")), strict=True)
        assert all(least <= median <= most for least, median, most in spread)


def test_roofline_points_hold_all_steps_and_lie_below_the_roof(row: RunRow, parsed: ParsedPage) -> None:
    table = parsed.tables["roofline-table"]
    assert sum(table.column("steps")) == row["steps"]
    assert sum(table.column("share")) == pytest.approx(1)
    work = [
        reached * time for reached, time in zip(table.column("reached"), table.column("seconds"), strict=True)
    ]
    assert sum(work) == pytest.approx(row["flops"])
    assert set(table.column("kind")) == {"prefill", "decode", "mixed"}
    (chart,) = [chart for name, chart in parsed.charts if name == "roofline-table"]
    assert (chart["peak_flops"], chart["peak_bytes"]) == (row["peak_flops_per_s"], row["peak_bytes_per_s"])


def test_histograms_hold_all_requests(row: RunRow, parsed: ParsedPage) -> None:
    assert sum(parsed.tables["prompts-table"].column("requests")) == row["computed_requests"]
    answers = parsed.tables["answers-table"]
    assert sum(answers.column("requests")) == row["computed_requests"]
    assert sum(answers.column("tokens")) == row["output_tokens"]


def test_latencies_are_those_of_the_run(row: RunRow, parsed: ParsedPage) -> None:
    table = parsed.tables["latency-table"]
    for name in ("queue", "ttft", "tpot", "itl", "latency"):
        found = dict(zip(table.column("percentile"), table.column(f"{name}_s"), strict=True))
        for percentile in ("p50", "p90", "p99"):
            assert found[percentile] == pytest.approx(row[f"{name}_{percentile}_s"])


def test_parts_of_the_time_add_up(row: RunRow, parsed: ParsedPage) -> None:
    table = parsed.tables["time-table"]
    wholes = dict.fromkeys(table.column("level"), 0.0)
    for level, seconds in zip(table.column("level"), table.column("seconds"), strict=True):
        wholes[level] += seconds
    assert wholes == pytest.approx({"whole run": row["wall_s"], "device": row["model_s"]})


def test_parts_of_the_time_of_an_older_run(copy: Path) -> None:
    (file,) = copy.glob("run-*.parquet")
    table = pq.read_table(file)
    newer = [
        name for name in table.column_names if name.startswith(("wall_", "device_")) and name != "wall_s"
    ]
    pq.write_table(table.drop_columns(newer), file)
    parsed = ParsedPage(page(read_run(copy)))
    assert set(parsed.tables["time-table"].column("level")) == {"whole run", "engine"}


def test_phases_and_buckets_are_those_of_the_run(row: RunRow, parsed: ParsedPage) -> None:
    phases, buckets = parsed.tables["phases-table"], parsed.tables["buckets-table"]
    assert set(phases.column("phase")) == {"prefill", "decode", "mixed"}
    assert sum(phases.column("steps")) == row["steps"]
    assert sum(phases.column("engine_s")) == pytest.approx(row["engine_wall_s"])
    assert dict(zip(buckets.column("bucket"), buckets.column("requests"), strict=True)).keys() == {
        "≤ 128",
        "≤ 256",
    }
    assert sum(buckets.column("requests")) == row["computed_requests"]


def test_the_prefix_tree_has_the_prefixes_that_saved_most(whole: ReportedRun, parsed: ParsedPage) -> None:
    table = parsed.tables["prefixes-table"]
    ((best, users, saved),) = whole.fetch(
        f"SELECT prefix, users, cached_tokens FROM {whole.own('prefixes')} ORDER BY cached_tokens DESC LIMIT 1"
    )
    assert (table.rows[0][0], table.column("users")[0], table.column("cached_tokens")[0]) == (
        str(best),
        users,
        saved,
    )
    assert (users, saved) == (300, 64 * 299)
    assert sum(table.column("cached_tokens")) == 64 * 299 + 32 * (300 - 38)
    nodes = set(table.column("prefix"))
    assert {parent for parent in table.column("parent") if parent != "–"} <= nodes
    assert len(nodes) == len(table.rows) > 1


def test_prefixes_beyond_the_most_that_are_shown_are_one_row(tmp_path: Path) -> None:
    write_tables(tmp_path, steps=20, requests=1200)
    run = read_run(tmp_path)
    table = ParsedPage(page(run)).tables["prefixes-table"]
    ((number, saved),) = run.fetch(f"SELECT count(*), sum(cached_tokens) FROM {run.own('prefixes')}")
    assert len(table.rows) <= MOST_NODES + 20
    assert table.rows[-1][0] == f"{number - len(table.rows) + 1:,} others"
    assert sum(table.column("cached_tokens")) == saved


@pytest.mark.slow
def test_the_most_expensive_requests_are_named_by_their_rows(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.parquet"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    run = read_run(tmp_path)
    found = run.fetch(f"SELECT key, device_s FROM {run.own('requests')} ORDER BY device_s DESC, key LIMIT 12")
    rows = [{"run_id": RUN_ID, "row_id": number, "key": key} for number, (key, _) in enumerate(found[:2])]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[ROWS]), tmp_path / f"rows-{RUN_ID}.parquet")
    for results, first in (
        (None, ["row 0", "row 1"]),
        (error_rows({"bad_json": ["a", None]}), ["a", "row 1"]),
    ):
        table = ParsedPage(page(read_run(tmp_path, results))).tables["expensive-table"]
        assert table.column("row")[:3] == [*first, f"key {found[2][0][:12]}"]
        assert table.column("device_s") == [seconds for _, seconds in found]


def test_forecasts_and_all_columns_have_their_digits(row: RunRow, parsed: ParsedPage) -> None:
    table, columns = parsed.tables["forecast-table"], parsed.tables["all-table"]
    found = {name: (before, after, ratio) for name, before, after, ratio in table.rows}
    assert found["steps"] == (500, row["steps"], row["steps"] / 500)
    assert found["MFU"] == (0.5, row["mfu"], row["mfu"] / 0.5)
    assert found.keys() == {
        "time of the engine",
        "steps",
        "output tokens",
        "MFU",
    }  # work_table with a forecast
    values = dict(zip(columns.column("column"), columns.column("value"), strict=True))
    numbers = {name: value for name, value in row.items() if type(value) in (int, float)}
    assert {name: values[name] for name in numbers} == numbers
    assert values.keys() == row.keys()


def test_errors_have_ids_and_no_texts(text: str, parsed: ParsedPage) -> None:
    table = parsed.tables["errors-table"]
    assert dict(zip(table.column("code"), table.column("rows"), strict=True)) == {
        "bad_json": 10,
        "prompt_too_long": 5,
    }
    assert table.column("examples")[1] == "long 0, long 1, long 2, long 3, long 4"
    assert "row 6" in table.column("examples")[0]
    assert "secret prompt text" not in text


def test_nobodys_text_is_markup(text: str, parsed: ParsedPage) -> None:
    assert len(parsed.scripts) == 2
    for _, attributes in parsed.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert not {"src", "srcset", "action", "formaction"} & attributes.keys()
    assert HOSTILE[0] in parsed.text  # whole, as text
    assert "\\u202egnp.exe\\x1b[31m" in parsed.text
    assert "x" * 1000 not in text
    text.encode("utf-8")


def test_only_its_own_scripts_may_run_and_nothing_may_be_fetched(parsed: ParsedPage) -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in parsed.policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    hashes = [f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in parsed.scripts]
    assert rules["script-src"].split() == hashes
    assert rules.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


def test_the_page_describes_itself(text: str) -> None:
    assert text.startswith(MARK)
    assert "Apache ECharts" in text


def test_missing_tables_are_replaced_by_a_sentence(folder: Path, tmp_path: Path) -> None:
    """Without a result, errors are counted."""
    (run,) = folder.glob("run-*.parquet")
    (tmp_path / run.name).write_bytes(run.read_bytes())
    parsed = ParsedPage(page(read_run(tmp_path)))
    assert "throughput-table" not in parsed.tables
    assert "this run has no table steps" in re.sub("`", "", parsed.text)
    assert "time-table" in parsed.tables
    errors = parsed.tables["errors-table"]
    assert (errors.column("rows"), set(errors.column("examples"))) == ([10, 5], {"–"})


def test_a_run_that_computed_nothing(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("rows", "rows_ok", "rows_error", "error_codes", "forecast_s", "engine_s"))
    write_tables(tmp_path, steps=0, requests=0, exit_status="wrong job", exit_code=78, **nothing)
    parsed = ParsedPage(page(read_run(tmp_path)))
    assert "this run computed nothing" in parsed.text
    assert "wrong job, exit code 78" in parsed.text
    assert {name for name, _ in parsed.charts} == {"time-table"}
    assert parsed.text.count("Nothing to show") == 4  # activities, the engine, errors, earlier runs
    assert "rows answered" not in parsed.text


def test_without_peaks_there_is_no_roof(tmp_path: Path) -> None:
    write_tables(tmp_path, steps=60, requests=50, peaks=False)
    parsed = ParsedPage(page(read_run(tmp_path)))
    (chart,) = [chart for name, chart in parsed.charts if name == "roofline-table"]
    assert chart["peak_flops"] is None
    assert "doctor --measure" in parsed.text


@pytest.mark.slow
def test_the_size_does_not_follow_the_run(tmp_path: Path, text: str) -> None:
    write_tables(tmp_path, steps=8_000, requests=2_000)
    larger = page(read_run(tmp_path))
    assert len(larger) < len(text) + 150_000 < 2_000_000
    tables = ParsedPage(larger).tables
    assert len(tables["throughput-table"].rows) == MOST_SEGMENTS
    assert len(tables["roofline-table"].rows) <= MOST_POINTS


@given(st.integers(0, 5000), st.integers(0, 200_000), st.floats(0, 1))
def test_bars_hold_every_length(least: int, more: int, place: float) -> None:
    most = least + more
    edges = bin_edges(least, least + place * more, most)
    assert edges[0] <= least
    assert edges[-1] > most
    assert all(one < other for one, other in pairwise(edges))
    assert len(edges) <= 2 * MOST_BARS


def test_cells_have_all_digits_and_a_text_for_people() -> None:
    table = PageTable(
        (TableColumn("a", "A", "s"), TableColumn("b", "B")), [(0.0123456789, "<b>"), (None, None)]
    )
    assert [numeric for _, numeric in table.headings] == [True, False]
    assert list(table.cells) == [
        [("n", "0.0123456789", "12.3 ms"), ("", "", "<b>")],
        [("n", "", "–"), ("", "", "–")],
    ]


def test_cost_energy_and_deadline_are_shown_where_they_are_known(row: RunRow) -> None:
    known = {"energy_j": 5400.0, "energy_j_per_token": 0.25, "price_per_hour": 2.5, "cost": 0.0094,
             "deadline": datetime(2026, 11, 21, 6, tzinfo=UTC), "deadline_met": False}  # fmt: skip
    assert "deadline" not in [tile.name for tile in tiles(row)]
    told = {(tile.value, tile.more) for tile in tiles(row | known)}
    deadline = ("missed", "2026-11-21 06:00:00 UTC")
    assert {("5.40 kJ", "0.25 J/token"), ("0.01", "at 2.50 an hour"), deadline} <= told


def test_measured_quality_is_shown_where_it_is_known(row: RunRow) -> None:
    measured = {"quality_kl": 0.00812, "quality_top1": 0.952, "quality_cosine": 0.99987}
    before, after = ({(tile.value, tile.more) for tile in tiles(one)} for one in (row, row | measured))
    assert after - before == {
        ("95.2%", "as with unquantised weights; KL 0.0081 nats"),
        ("0.9999", "to vectors of unquantised weights"),
    }


def test_weights_in_codes_are_named_as_elsewhere(row: RunRow) -> None:
    for quantization, told in (("stored", "stored fp8 weights"), ("int8", "int8 weights")):
        assert heading(row | {"quantization": quantization, "trial": False}).facts[-1] == told


def test_launches_have_a_section_where_they_are_known(tmp_path: Path, parsed: ParsedPage) -> None:
    assert "launches-table" not in parsed.tables, "a CPU launches no graphs"
    loaded = {"load_capture_s": 4.0, "load_graph_bytes": 300 << 20}
    forecast = {"forecast_eager_steps": 21, "forecast_eager_tokens": 900}
    write_tables(tmp_path, steps=60, requests=50, gpu=True, **loaded, **forecast)
    run = read_run(tmp_path)
    text, row = page(run), run.row
    tables = ParsedPage(text).tables
    table = tables["launches-table"]
    assert table.column("steps") == [row[f"{mode}_steps"] for mode in LAUNCH_MODES]
    assert sum(table.column("steps")) == row["steps"]
    assert sum(table.column("tokens_share")) == pytest.approx(1)
    assert table.rows[2][-2:] == [21, 900]
    assert "Capturing graphs took 4 s and 300 MiB of GPU memory while loading and" in text
    assert "The host launched" not in text
    several = replace(run, row={**row, "host_launches": 40})
    assert f"The host launched the {row['steps']} steps in 40 launches" in page(several)
    compared = tables["forecast-table"]
    assert ["steps launched by operators", 21, row["eager_steps"]] in [line[:3] for line in compared.rows]


def test_experts_have_a_section_where_there_are_some(copy: Path, parsed: ParsedPage) -> None:
    assert "experts-table" not in parsed.tables
    loads = [(layer, expert, tokens) for layer in range(12) for expert, tokens in enumerate((10, 30, 20))]
    rows = [
        {"run_id": RUN_ID, "layer": layer, "expert": expert, "tokens": tokens, "load": tokens / 20}
        for layer, expert, tokens in loads
    ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMAS[EXPERTS]), copy / f"experts-{RUN_ID}.parquet")
    table = ParsedPage(page(read_run(copy))).tables["experts-table"]
    assert table.rows == [[f"{layer}", 3, 60, 1.5, 1.0, 0.5] for layer in range(12)]


def test_each_process_has_a_lane_and_idle_time_its_causes(tmp_path: Path, parsed: ParsedPage) -> None:
    assert "activities-table" not in parsed.tables
    phases = {
        "startup_s": 1.0,
        "ingest_s": 5.0,
        "plan_s": 2.0,
        "load_s": 3.0,
        "publish_s": 0.5,
        "close_s": 0.25,
    }
    write_tables(tmp_path, steps=60, requests=50, **phases)
    done = [Activity("engine 0", "loading", 6, 11.0), Activity("command", "reading", 1.0, 6.0)]
    write_activities(tmp_path, RUN_ID, done)
    run = read_run(tmp_path)
    found = ParsedPage(page(run))
    assert found.tables["activities-table"].rows == [
        ["command", "reading", 1.0, 6.0, 5.0], ["engine 0", "loading", 6.0, 11.0, 5.0]
    ]  # fmt: skip
    causes = {name: run.row[f"idle_{name}_s"] for name in ("input", "load", "plan", "tail", "publish")}
    assert causes == pytest.approx(
        {"input": 5.0, "load": 4.0, "plan": 2.0, "tail": 0.0, "publish": 0.75}, abs=0.1
    )
    assert run.row["idle_devices_s"] == pytest.approx(sum(causes.values()))
    assert "they waited 5 s for input, 4 s for loading" in idle_text(run.row)


def test_code_in_sentences_is_marked_and_nothing_else() -> None:
    assert prose("run `a <b>` & more") == "run <code>a &lt;b&gt;</code> &amp; more"
