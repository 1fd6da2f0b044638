"""Writes the report table of activities of all processes of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from batchinfer.report.tables.columns.declared import ACTIVITIES, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool


class Activity(NamedTuple):
    """An interval of time in which a process of a run had one activity.

    Attributes:
        process: The name of the process.
        activity: The activity.
        from_s: Start in seconds after the command was started.
        until_s: End in seconds after the command was started.
        node: Address of the node of a Ray cluster, or None.
        machine_class: The machine class of this node, or None.
    """

    process: str
    activity: str
    from_s: float
    until_s: float
    node: str | None = None
    machine_class: str | None = None


def write_activities(folder: Path, run_id: str, activities: Iterable[Activity]) -> Path:
    """Write the report table `activities` of a run atomically, and return its path.

    Raises:
        OSError: The table cannot be written.
    """
    with Spool(table_path(folder, ACTIVITIES, run_id), SCHEMAS[ACTIVITIES]) as spool:
        for activity in activities:
            spool.append((run_id, *activity))
        return spool.finish()
