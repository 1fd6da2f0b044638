"""The top of the page: the heading, the main numbers, the forecast compared with the run, and the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchinfer.core.wording import count, counted, percent, seconds, short_number, shown, size
from batchinfer.machine.hardware import coded_text
from batchinfer.report.answer_text import perplexity
from batchinfer.report.page.page_table import Amount, PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.of_tasks import WITHOUT_OUTPUT
from batchinfer.report.tables.exit_status import is_published
from batchinfer.report.tables.tables import RunRow


@dataclass(frozen=True, slots=True)
class Tile:
    """A number in large type at the top of the report page.

    Attributes:
        name: The name of the number.
        value: The number as text.
        more: Further text in small type.
    """

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Heading:
    """The heading of the report page, which says which run it reports and how the run ended.

    Attributes:
        mark: "good" or "bad".
        status: How the run ended.
        started: The start time.
        facts: Task, model, device, and similar facts.
    """

    mark: str
    status: str
    started: str
    facts: Sequence[str]


def heading(row: RunRow) -> Heading:
    """Return the heading of the report page for a row of the run table."""
    good = is_published(row["exit_status"]) and not row["exit_code"]
    code = f", exit code {row['exit_code']}" if row["exit_code"] else ""
    trial = "trial (--limit)" if row["trial"] else None
    task = row["task"] if row["task"] in WITHOUT_OUTPUT else None
    facts = (task, row["model"], _device(row), row["dtype"], _weights(row), trial)
    status = f"{row['exit_status'] or 'ended'}{code}"
    return Heading("good" if good else "bad", status, shown(row["started_at"]), list(filter(None, facts)))


def _device(row: RunRow) -> str | None:
    cores = f", {row['cores']} cores" if row["cores"] else ""
    return f"{row['hardware']}{cores}" if row["hardware"] else row["device"]


def _weights(row: RunRow) -> str | None:
    return f"{coded_text(row['quantization'])} weights" if row["quantization"] not in (None, "none") else None


def tiles(row: RunRow) -> Iterator[Tile]:
    """Yield the main numbers of a run as tiles, given its row of the run table.

    Unknown numbers are left out.
    """
    if row["rows"] is not None:
        yield _row_tile(row)
    if row["accuracy"] is not None:
        more = f"of {counted(row['labelled_rows'], 'labelled row')}; {percent(row['normalised_accuracy'])} normalised"
        yield Tile("right answers", percent(row["accuracy"]), more)
    engine = row["engine_wall_s"]
    yield from _answers(row)
    yield Tile("time", seconds(row["wall_s"]), f"{seconds(engine)} in the engine" if engine else "")
    if row["total_tokens_per_s"] is not None:
        output = f"{short_number(row['output_tokens_per_s'])} of them output" if row["output_tokens"] else ""
        yield Tile("tokens a second", short_number(row["total_tokens_per_s"]), output)
    if row["steps"]:
        shares = f"MFU {percent(row['mfu'])}, MBU {percent(row['mbu'])}"
        yield Tile("of the roofline", percent(row["roofline_efficiency"]), shares)
    if row["steps"] and (saved := _saved(row)) is not None:
        share = _share(saved, saved + row["prompt_tokens_run"])
        yield Tile("prompt tokens saved", percent(share), f"{short_number(saved)} by prefixes and duplicates")
    yield from _quality(row)
    if row["worker_peak_rss_bytes"] is not None:
        parent = row["parent_peak_rss_bytes"]
        more = f"of the engine; {size(parent)} of the parent" if parent else ""
        yield Tile("peak memory", size(row["worker_peak_rss_bytes"]), more)
    yield from _costs(row)


def _answers(row: RunRow) -> Iterator[Tile]:
    if row["mean_label_probability"] is not None:
        labels = counted(len(row["labels"]), "label") if row["labels"] else ""
        yield Tile(
            "mean probability", percent(row["mean_label_probability"]), f"of {labels}" if labels else ""
        )
    if row["mean_logprob"] is not None:
        tokens = (
            f"mean log-probability {row['mean_logprob']:.3f} of {short_number(row['scored_tokens'])} tokens"
        )
        yield Tile("perplexity", short_number(perplexity(row["mean_logprob"])), tokens)
    if row["score_p50"] is not None:
        spread = f"p10 {row['score_p10']:.3g}, p90 {row['score_p90']:.3g}"
        yield Tile("median score", f"{row['score_p50']:.3g}", spread)
    if row["dimensions"] is not None:
        yield Tile("dimensions", count(row["dimensions"]), "of a vector")


def _quality(row: RunRow) -> Iterator[Tile]:
    if row["quality_top1"] is not None:
        more = f"as with unquantised weights; KL {row['quality_kl']:.2g} nats"
        yield Tile("same next token", f"{row['quality_top1']:.1%}", more)
    if row["quality_cosine"] is not None:
        yield Tile("cosine", f"{row['quality_cosine']:.4f}", "to vectors of unquantised weights")


def _row_tile(row: RunRow) -> Tile:
    rows, errors = row["rows"], row["rows_error"]
    bad = "" if not errors else f"{counted(errors, 'error row')} ({percent(_share(errors, rows))})"
    if row["rows_ok"] is None:
        return Tile("rows of the input", count(rows), bad)
    return Tile("rows answered", count(row["rows_ok"]), ", ".join(filter(None, [f"of {count(rows)}", bad])))


def _costs(row: RunRow) -> Iterator[Tile]:
    if row["cost"] is not None:
        yield Tile("cost", f"{row['cost']:,.2f}", f"at {row['price_per_hour']:,.2f} an hour")
    if row["energy_j"] is not None:
        yield Tile("energy", shown(row["energy_j"], "J"), f"{shown(row['energy_j_per_token'], 'J/token')}")
    if row["deadline"] is not None:
        met = {True: "met", False: "missed", None: "not known"}[row["deadline_met"]]
        yield Tile("deadline", met, shown(row["deadline"]))


def _saved(row: RunRow) -> int | None:
    if row["prompt_tokens_run"] is None:
        return None
    return int(row["prefix_saved_tokens"] or 0) + int(row["duplicate_saved_tokens"] or 0)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_FORECAST = (
    TableColumn("figure", "figure"),
    TableColumn("forecast", "forecast"),
    TableColumn("fact", "actual"),
    TableColumn("ratio", "actual ÷ forecast", "0…1"),
)
# title, column of the forecast, column of the actual value, unit
_PAIRS = (
    ("time of the engine", "forecast_s", "engine_wall_s", "s"),
    ("steps", "forecast_steps", "steps", "steps"),
    ("steps replayed as one graph", "forecast_full_graph_steps", "full_graph_steps", "steps"),
    ("steps replayed in pieces", "forecast_piecewise_graph_steps", "piecewise_graph_steps", "steps"),
    ("steps launched by operators", "forecast_eager_steps", "eager_steps", "steps"),
    ("prompt tokens run", "forecast_prompt_tokens", "prompt_tokens_run", "tokens"),
    ("output tokens", "forecast_output_tokens", "output_tokens", "tokens"),
    ("cost of the engine", "forecast_engine_cost", "engine_cost", "money"),
    ("MFU", "forecast_mfu", "mfu", "0…1"),
    ("MBU", "forecast_mbu", "mbu", "0…1"),
)
_BASIS = {
    "runs": "earlier runs",
    "measured": "what `batchinfer doctor --measure` measured",
    "declared": "a declared share of the peaks",
    "limit": "half the peaks, which is assumed",
}


def forecast(run: ReportedRun) -> PageSection:
    """Return the section of the report page that compares the forecast of a run with the actual numbers."""
    rows = [row for pair in _PAIRS if (row := _compared(run.row, *pair)) is not None]
    title = "Forecast and actual"
    if not rows:
        return PageSection("forecast", title, "Nothing to show: this run had no forecast.")
    options = {"category": "figure", "bars": ["ratio"], "unit": "0…1", "horizontal": True, "baseline": 1}
    chart = Chart("bars", "Bars that compare the run with its forecast", options)
    text = "The forecast before the first token, compared with the run. At 100% the forecast was right."
    return PageSection("forecast", title, f"{text}{_known_from(run.row)}", chart, PageTable(_FORECAST, rows))


def _known_from(row: RunRow) -> str:
    if row["forecast_basis"] is None:
        return ""
    basis = _BASIS.get(row["forecast_basis"], row["forecast_basis"])
    if not row["output_tokens"]:
        return f" Step times came from {basis}."
    runs = row["forecast_answers_from"]
    lengths = (
        f"the lengths of {count(runs)} earlier run{'s' if runs > 1 else ''}" if runs else "max_tokens tokens"
    )
    return f" Step times came from {basis}; answers were assumed to have {lengths}."


def _compared(row: RunRow, title: str, before: str, after: str, unit: str) -> tuple[Any, ...] | None:
    expected, found = row.get(before), row.get(after)
    if expected is None or found is None or not (expected or found):
        return None
    return title, Amount(expected, unit), Amount(found, unit), found / expected if expected else None


_WORK = (
    TableColumn("what", "tokens"),
    TableColumn("run", "run", "tokens"),
    TableColumn("prefix", "saved by prefixes", "tokens"),
    TableColumn("duplicates", "saved by duplicates", "tokens"),
    TableColumn("recomputed", "run again", "tokens"),
    TableColumn("padded", "padding", "tokens"),
)


def work(run: ReportedRun) -> PageSection:
    """Return the section of the report page about the tokens that a run computed, saved and wasted."""
    row, title = run.row, "Work done and work saved"
    rows: list[tuple[Any, ...]] = [
        ("prompt tokens", row["prompt_tokens_run"], row["prefix_saved_tokens"], row["duplicate_saved_tokens"], None,
         None),
    ]  # fmt: skip
    if run.has_output:
        rows.append(
            ("output tokens", row["output_tokens"], None, row["duplicate_saved_output_tokens"], None, None)
        )
    rows.append(("wasted", None, None, None, row["recomputed_tokens"], row["padded_tokens"]))
    names = [column.name for column in _WORK[1:]]
    options = {"category": "what", "bars": names, "unit": "tokens", "horizontal": True, "stacked": True}
    chart = Chart("bars", "Stacked bars of computed and saved tokens", options)
    text = (
        f"{count(row['computed_requests'])} requests were computed, {count(row['reused_requests'])} were stored "
        f"already, and {counted(row['duplicate_rows'], 'row')} shared another row's answer."
    )
    return PageSection("work", title, text, chart, PageTable(_WORK, rows))
