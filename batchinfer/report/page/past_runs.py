"""The section that compares a run with earlier runs of its job."""

from __future__ import annotations

from batchinfer.report.history import HISTORY
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection

MOST_RUNS = 60

_RUNS = f"""
SELECT run_id, strftime(started_at AT TIME ZONE 'UTC', '%Y-%m-%d %H:%M'), exit_status, rows, tokens, total_tokens_per_s,
    roofline_efficiency, wall_s, engine_s, forecast_s, hardware, calibration_error, brier_score, accuracy,
    normalised_accuracy
FROM {HISTORY} WHERE run_id <= ? AND tokens > 0 AND trial IS NOT TRUE ORDER BY run_id DESC LIMIT {MOST_RUNS}
"""
_COLUMNS = (
    TableColumn("run_id", "run"),
    TableColumn("started", "started (UTC)"),
    TableColumn("status", "ended"),
    TableColumn("rows", "rows", "rows"),
    TableColumn("tokens", "tokens run", "tokens"),
    TableColumn("tokens_per_s", "tokens a second", "tokens/s"),
    TableColumn("roofline", "of the roofline", "0…1"),
    TableColumn("wall_s", "time", "s"),
    TableColumn("engine_s", "in the engine", "s"),
    TableColumn("forecast_s", "forecast of it", "s"),
    TableColumn("hardware", "hardware"),
)
_CALIBRATED = (
    TableColumn("calibration_error", "calibration error"),
    TableColumn("brier_score", "Brier score"),
)
_MEASURED = (
    TableColumn("accuracy", "right answers", "0…1"),
    TableColumn("normalised_accuracy", "right once normalised", "0…1"),
)


def past_runs(run: ReportedRun) -> PageSection:
    """Return the section of the report page that compares the speed of a run with earlier runs of its job."""
    title = "Compared with earlier runs"
    rows = run.fetch(_RUNS, [run.row["run_id"]])[::-1]
    if len(rows) < 2:
        return PageSection(
            "runs",
            title,
            "Nothing to show: fewer than two runs of the whole job have computed anything so far. Trials (`--limit`) "
            "are not shown here, but forecasts use them.",
        )
    options = {"category": "started", "lines": [{"y": "tokens_per_s"}], "unit": "tokens/s", "zero": True}
    chart = Chart("curves", "A line of tokens per second over the runs of the job", options)
    text = (
        "Runs of this job that computed something, without trials. Runs with more or different work have different "
        "speeds; `batchinfer history` shows which runs are comparable."
    )
    columns = (*_COLUMNS, *_CALIBRATED, *_MEASURED)
    shown = [
        at for at in range(len(columns)) if at < len(_COLUMNS) or any(row[at] is not None for row in rows)
    ]
    table = PageTable(tuple(columns[at] for at in shown), [tuple(row[at] for at in shown) for row in rows])
    return PageSection("runs", title, text, chart, table)
