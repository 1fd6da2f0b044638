"""Formats a row of the run table as the summary at the end of a run. Does no input or output."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchinfer.core.samples import LAUNCH_MODES, LaunchMode
from batchinfer.core.statistics.quality import Quality
from batchinfer.core.wording import (
    UNKNOWN,
    count,
    counted,
    percent,
    rough_duration,
    seconds,
    short_number,
    size,
)
from batchinfer.machine.hardware import arithmetic_text
from batchinfer.report.answer_text import answers_line
from batchinfer.report.tables.exit_status import is_published

_TOP_CODES = 3  # error codes in the summary; the table has all
_NAME_WIDTH = 9
CROWDED_CORES = 0.25  # cores used by other processes above which the summary mentions them
NAME_END = 2 + _NAME_WIDTH  # where a line's text begins, after the first line
PHASES = ("startup", "ingest", "plan", "load", "engine", "publish", "close", "other")

Row = Mapping[str, Any]
_LAUNCHED: dict[LaunchMode, str] = {
    "full_graph": "as one graph",
    "piecewise_graph": "as graphs of pieces",
    "eager": "an operator at a time",
}


def summary(
    row: Row, report: Path | None = None, *, labels: bool = False, examples: Sequence[str] = ()
) -> str:
    """Return the summary at the end of a run as aligned lines. An unknown value is a dash or left out.

    Args:
        row: A row of the run table.
        report: The file of the run table, or None if the run changed nothing.
        labels: True if answers are labels; then the suggested next command counts them.
        examples: A line for each example answer.
    """
    lines = [
        ("rows", _rows(row)),
        answers_line(row),
        ("right", _right(row)),
        ("work", _work(row)),
        ("tokens", _tokens(row)),
        ("speed", _speed(row)),
        ("latency", _latency(row)),
        ("limit", _limit(row)),
        ("quality", _quality(row)),
        ("busy", _busy(row)),
        ("lost", _lost(row)),
        ("launched", _launched(row)),
        ("guided", _guided(row)),
        ("drafts", _drafts(row)),
        ("time", _time(row)),
        ("forecast", _forecast(row)),
        ("deadline", _deadline(row)),
        ("memory", _memory(row)),
        ("cost", _cost(row)),
        ("results", _results(row)),
        ("report", "" if report is None else str(report)),
        (
            "page",
            "" if report is None or not row["steps"] else f"batchinfer report {shlex.quote(row['output'])}",
        ),
        *_examples(examples),
        ("next", _next(row, labels)),
    ]
    shown = [f"  {name:<{_NAME_WIDTH}}{text}" for name, text in lines if text]
    return "\n".join([_headline(row), *shown])


def _headline(row: Row) -> str:
    status = row["exit_status"] or "ended"
    code = f" (exit code {row['exit_code']})" if row["exit_code"] else ""
    return f"{row['job']}: {status}{code} after {seconds(row['wall_s'])}"


def _rows(row: Row) -> str:
    if row["rows"] is None:
        return ""
    errors = row["rows_error"]
    text = f"{count(row['rows_ok'])} ok, {counted(errors, 'error row')}"
    if errors:
        text += f" ({percent(errors / row['rows'])})  {_codes(row['error_codes'] or {})}"
    missing = row["rows"] - (row["rows_ok"] or 0) - (errors or 0)
    return f"{text}, {count(missing)} not done yet" if missing else text.rstrip()


def _right(row: Row) -> str:
    """Return text with the share of answers that are the expected ones."""
    rows = row["labelled_rows"]
    if rows is None:
        return ""
    without = (row["unlabelled_rows"] or 0) + (row["unreadable_labels"] or 0)
    rest = f"{counted(without, 'row')} not measured" if without else ""
    if not rows:
        return f"no row has an expected answer; {rest}" if rest else "no row has an expected answer"
    parts = [
        f"{row['accuracy']:.1%} of {counted(rows, 'labelled row')} exactly",
        f"{row['normalised_accuracy']:.1%} normalised",
        f"calibration error {row['calibration_error']:.3f}" if row["calibration_error"] is not None else "",
        f"{counted(row['labelled_errors'], 'error row')} among the wrong ones"
        if row["labelled_errors"]
        else "",
        rest,
    ]
    return ", ".join(filter(None, parts))


def _codes(codes: Mapping[str, int]) -> str:
    ranked = sorted(codes.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{code} {count(number)}" for code, number in ranked[:_TOP_CODES]]
    return ", ".join([*named, "…"] if len(ranked) > _TOP_CODES else named)


def _work(row: Row) -> str:
    parts = [
        (row["computed_requests"], "computed now"),
        (row["reused_requests"], "reused from earlier runs"),
        (row["duplicate_rows"], "served as duplicates"),
    ]
    return ", ".join(f"{count(number)} {what}" for number, what in parts if number is not None)


def _tokens(row: Row) -> str:
    if row["prompt_tokens_run"] is None:
        return ""
    saved = [
        (row["prefix_saved_tokens"], "by shared prefixes"),
        (row["duplicate_saved_tokens"], "by duplicates"),
    ]
    savings = [f"{short_number(number)} {what}" for number, what in saved if number]
    parts = [f"{short_number(row['prompt_tokens_run'])} prompt run"]
    if row["output_tokens"]:
        parts.append(f"{short_number(row['output_tokens'])} output")
    if savings:
        savings[0] = savings[0].replace(" by ", " saved by ")
    return ", ".join([*parts, *savings])


def _speed(row: Row) -> str:
    if row["total_tokens_per_s"] is None:
        return ""
    if not row["output_tokens"]:
        return f"{short_number(row['prompt_tokens_per_s'])} prompt tok/s"
    parts = [f"{short_number(row[f'{kind}_tokens_per_s'])} {kind} tok/s" for kind in ("prompt", "output")]
    return f"{' + '.join(parts)} = {short_number(row['total_tokens_per_s'])} tok/s"


def _latency(row: Row) -> str:
    stems = ("ttft", "tpot", "itl") if row["output_tokens"] else ("latency",)
    shown = [_spread(row, stem) for stem in stems if row[f"{stem}_p50_s"] is not None]
    return ", ".join(shown) + "  (p50 / p99)" if shown else ""


def _spread(row: Row, stem: str) -> str:
    name = "whole request" if stem == "latency" else stem.upper()
    return f"{name} {seconds(row[f'{stem}_p50_s'])} / {seconds(row[f'{stem}_p99_s'])}"


def _limit(row: Row) -> str:
    if not row["steps"]:
        return ""
    device = f"{row['hardware'] or UNKNOWN}, {_arithmetic(row)}"
    if row["mfu"] is None or row["mbu"] is None:
        return f"unknown hardware ({device}): run `batchinfer doctor --measure`"
    shares = f"MFU {percent(row['mfu'])}, MBU {percent(row['mbu'])}"
    peaks = f"{row['peak_source'] or UNKNOWN} peaks: {device}"
    return f"roofline {percent(row['roofline_efficiency'])} ({shares}) of {peaks}"


def _arithmetic(row: Row) -> str:
    coded = row["quantization"], row["kv_cache_dtype"]
    return arithmetic_text(row["dtype"] or UNKNOWN, *coded, row["deterministic"])


def _quality(row: Row) -> str:
    """Return a phrase about the measured quality of quantised weights, or an empty string without one."""
    if row["quality_positions"] is None:
        return ""
    found = Quality(row["quality_kl"], row["quality_top1"], row["quality_positions"], row["quality_cosine"])
    return str(found)


def _busy(row: Row) -> str:
    others, cores = row["other_cores"], row["cores"]
    if others is None or not cores or others < CROWDED_CORES:
        return ""
    return f"other processes used {others:.1f} of {cores} cores; the run would be faster on an idle machine"


def _lost(row: Row) -> str:
    wall = row["engine_wall_s"]
    if not wall:
        return ""
    shares = [("padding", row["padding_share"]), ("recomputation", row["recomputed_share"])]
    shares += [
        (name, row[f"{name}_s"] / wall) for name in ("overhead", "idle") if row[f"{name}_s"] is not None
    ]
    if row["stage_wait_share"] is not None:
        shares.append(("stages waiting for one another", row["stage_wait_share"]))
    if row["collective_share"] is not None:
        shares.append(("sums over ranks", row["collective_share"]))
    return ", ".join(f"{name} {percent(share)}" for name, share in shares)


def _launched(row: Row) -> str:
    """Return text about the launch modes of steps on a GPU."""
    launched = launch_text(row)
    if launched is None:
        return ""
    times = row.get("host_launches")
    if times is not None and times < row["steps"]:
        launched = f"{launched}, {short_number(row['steps'] / times)} at once on average"
    captures = [("loading", row["load_capture_s"]), ("steps", row["capture_s"])]
    took = ", ".join(f"{seconds(spent)} in {what}" for what, spent in captures if spent)
    return f"{launched}; captures took {took}" if took else launched


def launch_text(row: Row, prefix: str = "") -> str | None:
    """Return the share of steps for each launch mode as text, or None if unknown.

    Args:
        row: A row of the run table.
        prefix: The prefix of the names of the columns, such as "forecast_".
    """
    steps = {mode: row.get(f"{prefix}{mode}_steps") for mode in LAUNCH_MODES}
    known = {mode: number for mode, number in steps.items() if number is not None}
    whole = sum(known.values())
    if not whole:
        return None
    shares = (f"{_LAUNCHED[mode]} {percent(number / whole)}" for mode, number in known.items())
    return "steps launched " + ", ".join(shares)


def _guided(row: Row) -> str:
    """Return text with the counts and times of constraints."""
    if not row["constrained_requests"]:
        return ""
    constrained, steered, forced = row["constrained_requests"], row["steered_requests"], row["forced_tokens"]
    return (
        f"{count(constrained)} answers under a constraint, which forbade the most likely token in {count(steered)}; "
        f"{short_number(forced)} tokens forced, masks {seconds(row['mask_s'])}"
    )


def _drafts(row: Row) -> str:
    """Return text with the acceptance of draft tokens, and the time that they saved."""
    drafted, accepted = row.get("drafted_tokens"), row.get("accepted_tokens")
    if not drafted or accepted is None:
        return ""
    saved = row["drafts_saved_s"]
    effect = (
        f", about {seconds(abs(saved))} {'saved' if saved > 0 else 'lost'}"
        if saved and abs(saved) >= 0.1
        else ""
    )
    beside = row.get("draft_model_runs") == "beside"
    model = f"; the draft model took {seconds(row['proposing_s'])} alongside" if beside else ""
    return f"{percent(accepted / drafted)} of {short_number(drafted)} proposed tokens were accepted{effect}{model}"


def _time(row: Row) -> str:
    phases = [(name, row[f"{name}_s"]) for name in PHASES]
    return ", ".join(f"{name} {seconds(spent)}" for name, spent in phases if spent is not None)


def _forecast(row: Row) -> str:
    """Return text that compares the forecast with the run."""
    if row["forecast_s"] is None or row["forecast_error"] is None:
        return ""
    tokens, ran = row["forecast_output_tokens"], row["output_tokens"]
    output = f"; output {short_number(tokens)} tokens, were {short_number(ran)}" if tokens or ran else ""
    engine = f"engine {seconds(row['forecast_s'])}, took {seconds(row['engine_wall_s'])}"
    return f"{engine} ({off(row['forecast_error'])}){output}"


def off(error: float) -> str:
    """Return the relative error of a forecast as text: in percent, or as a multiple of the forecast from 2 on."""
    return f"{error:+.1%}" if error < 1 else f"{1 + error:.3g} times the forecast"


def _deadline(row: Row) -> str:
    if row["deadline"] is None:
        return ""
    at, late_s = row["deadline"].astimezone(), (row["finished_at"] - row["deadline"]).total_seconds()
    when = f"{at:%Y-%m-%d %H:%M}"
    if row["deadline_met"]:
        return f"{when}, met with {rough_duration(-late_s)} to spare"
    missed = f"missed by {rough_duration(late_s)}" if late_s > 0 else f"{rough_duration(-late_s)} away"
    if row["deadline_rows"] is None:
        return f"{when}, {missed}"
    speed = (
        "" if row["goodput_tokens_per_s"] is None else f", {short_number(row['goodput_tokens_per_s'])} tok/s"
    )
    return f"{when}, {missed}; by then {counted(row['deadline_rows'], 'row')} answered{speed}"


def _memory(row: Row) -> str:
    peaks = [("parent", row["parent_peak_rss_bytes"]), ("worker", row["worker_peak_rss_bytes"])]
    parts = [f"{name} {size(peak)} at its peak" for name, peak in peaks if peak is not None]
    if row["rank_peak_rss_bytes"] is not None:
        parts.append(
            f"a rank at most {size(row['rank_peak_rss_bytes'])}, and it read at most "
            f"{size(row['rank_read_bytes'])} of the model"
        )
    return ", ".join(parts)


def _cost(row: Row) -> str:
    """Return text with the cost of the machine's time, and the energy."""
    parts = []
    if row["cost"] is not None:
        parts.append(f"{row['cost']:,.2f} at {row['price_per_hour']:g} an hour")
    if row["energy_j"] is not None:
        each = row["energy_j_per_token"]
        per_token = "" if each is None else f", {short_number(each)} J a token"
        parts.append(f"{short_number(row['energy_j'])}J while the engine ran{per_token}")
    return "; ".join(parts)


def _results(row: Row) -> str:
    return f"{row['output']}/*.parquet" if is_published(row["exit_status"]) else "not published"


def _examples(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if at else "answers", line) for at, line in enumerate(lines)]


def _next(row: Row, labels: bool) -> str:
    """Return the next step: a command that shows answers, or how to continue a failed run."""
    result = shlex.quote(row["output"])
    if not is_published(row["exit_status"]):
        return "finished answers are kept: once the cause is removed, the same command computes only the rest"
    if row["exit_code"]:
        return (
            f"batchinfer show {result} --errors; correct these rows and run the same command again: it computes only "
            "what changed"
        )
    if labels:
        return f'batchinfer query {result} "select label, count(*) from results group by all order by 2 desc"'
    return f"batchinfer show {result}"
