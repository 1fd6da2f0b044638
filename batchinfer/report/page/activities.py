"""The section with the activities of each process."""

from __future__ import annotations

from batchinfer.core.wording import seconds
from batchinfer.report.page.page_table import PageTable, TableColumn
from batchinfer.report.page.reported import ReportedRun
from batchinfer.report.page.section import Chart, PageSection
from batchinfer.report.tables.columns.declared import ACTIVITIES
from batchinfer.report.tables.tables import RunRow

MOST_SHOWN = 200  # more spans would be unreadable
_COLUMNS = (
    TableColumn("process", "process"),
    TableColumn("activity", "activity"),
    TableColumn("from_s", "from", "s"),
    TableColumn("until_s", "to", "s"),
    TableColumn("took_s", "time", "s"),
)
# The longest activities, in the order of processes and time
_LONGEST = """
SELECT process, activity, from_s, until_s, took_s FROM (
    SELECT *, until_s - from_s AS took_s FROM {activities} ORDER BY took_s DESC LIMIT {most}
) ORDER BY process <> 'command', process, from_s
"""
_CAUSES = (
    ("input", "idle_input_s"),
    ("loading", "idle_load_s"),
    ("planning", "idle_plan_s"),
    ("the other replicas' last rows", "idle_tail_s"),
    ("publishing", "idle_publish_s"),
)


def activities(run: ReportedRun) -> PageSection:
    """Return the section of the report page that shows what each process did when, as a lane per process."""
    name, title = "activities", "Activities of each process"
    if not run.has(ACTIVITIES):
        return PageSection(name, title, run.why_empty(ACTIVITIES))
    found = run.fetch(_LONGEST.format(activities=run.own(ACTIVITIES), most=MOST_SHOWN))
    options = {"lane": "process", "part": "activity", "from": "from_s", "until": "until_s"}
    chart = Chart("lanes", "A lane for each process of the run, with its activities", options)
    return PageSection(name, title, idle_text(run.row), chart, PageTable(_COLUMNS, found))


def idle_text(row: RunRow) -> str:
    """Return a sentence about the idle time of a run's devices, with its causes, the longest first."""
    if row["idle_devices_s"] is None:
        return "The run computed nothing."
    causes = sorted(((row[column] or 0.0, cause) for cause, column in _CAUSES), reverse=True)
    waits = ", ".join(f"{seconds(took)} for {cause}" for took, cause in causes if took > 0)
    return f"Devices had nothing to run for {seconds(row['idle_devices_s'])}: they waited {waits}."
