"""Implements `batchinfer report`: writes one HTML file about a run, from the tables of its report."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputMissing, OutputConflict, StorageError
from batchinfer.filesystem.duck import translate_errors
from batchinfer.filesystem.durable import FileOps, replace_bytes, storage
from batchinfer.filesystem.location import Location
from batchinfer.report.page.document import MARK, page
from batchinfer.report.page.reported import ReportedRun, find_run, is_newest_published
from batchinfer.report.tables.columns.declared import RUN
from batchinfer.report.tables.folder import report_folder, tables
from batchinfer.report.tables.tables import RunRow
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.manifest import read_manifest
from batchinfer.verbs.query import RESULTS, ResultPlace, add_views, open_database
from batchinfer.verbs.status import status_of

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """An HTML page about a run that was written.

    Attributes:
        path: The file of the page.
        bytes: Its size.
        run_id: The id of the run.
        exit_status: How the run ended.
    """

    path: str
    bytes: int
    run_id: str
    exit_status: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)


def write_page(folder: Path, output: Path | None = None, run_id: str | None = None) -> WrittenPage:
    """Write an HTML page about a run, and return its path and size. Replaces an earlier page, but no other file.

    Args:
        folder: A result folder or report folder.
        output: The file to write. None for `report.html` in the report folder.
        run_id: The id of the run. None for the newest run.

    Raises:
        InputMissing: No run has written a report, or none has this id.
        OutputConflict: The file exists and is no such page.
        StorageError: A file cannot be read or written.
        OutOfMemory: The report tables need too much memory.
    """
    place, report = _place(folder)
    path = report / PAGE if output is None else output
    _check_ours(path)
    with open_database() as (database, _, _), translate_errors(report):
        names = add_views(database, place)
        row = find_run(database, run_id, "" if folder == report else place.ending)
        if row is None:
            raise InputMissing(_no_run(folder, report, run_id))
        in_place = RESULTS in names and is_newest_published(database, row, place.ending)
        text = page(ReportedRun(database, row, in_place, _newer(folder, row)))
    content = text.encode()
    try:
        replace_bytes(path, content, FileOps())
    except StorageError as error:
        if output is not None:
            raise
        raise StorageError(f"{error}; --output FILE writes the page elsewhere") from error
    return WrittenPage(str(path), len(content), str(row["run_id"]), row["exit_status"])


def _place(folder: Path) -> tuple[ResultPlace, Path]:
    if not tables(folder, RUN) and read_manifest(Location.at(folder)) is None:
        report = report_folder(find_state(folder).root)
        if tables(report, RUN):
            return ResultPlace(folder, report), report
        _check_begun(folder)
    place = ResultPlace.of(folder)
    if place.report is None:
        raise InputMissing(
            f"{folder}: no run has written a report yet; the next `batchinfer run` that computes something writes one"
        )
    return place, place.report


def _check_begun(folder: Path) -> None:
    try:
        state = status_of(folder).state
    except InputMissing:  # no run has begun: the error of `query` is used
        return
    how = "is still running" if state == "running" else state
    raise InputMissing(
        f"{folder}: no run has written a report yet; the last run {how}: see `batchinfer status {folder}`"
    )


def _check_ours(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not _is_page(path):
        raise OutputConflict(
            f"{path}: exists already, and batchinfer did not write it; choose another name, or move it away"
        )


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with storage(path, "read"), path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def _no_run(folder: Path, report: Path, run_id: str | None) -> str:
    if run_id is None:
        return f"{folder}: {report} has finished runs of other folders only; see `batchinfer status {folder}`"
    return f"{report}: there is no run {run_id}; `batchinfer history {report} --json` lists all"


def _newer(folder: Path, row: RunRow) -> str:
    try:
        status = status_of(folder)
    except InputMissing:  # a report folder, or a state that was removed
        return ""
    if status.run_id == row["run_id"] or status.state not in ("running", "crashed"):
        return ""
    if status.state == "running":
        return "A newer run is still running; this page is about the run before it."
    return "A newer run crashed before it could write its tables; this page is about the run before it."
