"""Writes the tables of accuracy: by field, by label and by probability."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchinfer.machine.folders import make_folder
from batchinfer.report.tables.columns.declared import (
    ACCURACY,
    CALIBRATION,
    COLUMNS,
    CONFUSION,
    SCHEMAS,
    completed,
)
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool


@dataclass(frozen=True, slots=True)
class FieldAccuracy:
    """The accuracy of rows with an expected answer."""

    field: str | None  # a field of the answers, or None for whole answers
    labelled_rows: int
    labelled_errors: int
    exact_rows: int
    normalised_rows: int


@dataclass(frozen=True, slots=True)
class ProbableRows:
    """Labelled rows whose answers have a probability within these bounds."""

    from_probability: float
    to_probability: float
    rows: int
    right_rows: int
    mean_probability: float | None  # None without rows


ConfusedRows = tuple[str | None, str, str, str | None, int]  # field, expected, outcome, answer, rows


def write_accuracy(
    folder: Path,
    run_id: str,
    fields: Iterable[FieldAccuracy],
    confusion: Iterable[ConfusedRows],
    probable: Iterable[ProbableRows],
) -> None:
    """Write the tables, each atomically.

    Raises:
        OSError: A table cannot be written.
    """
    make_folder(folder)
    for table, rows in ((ACCURACY, fields), (CALIBRATION, probable)):
        with Spool(table_path(folder, table, run_id), SCHEMAS[table]) as spool:
            for one in rows:
                row = {"run_id": run_id} | {name: getattr(one, name) for name in type(one).__slots__}
                spool.append(tuple(completed(row, COLUMNS[table]).values()))
            spool.finish()
    with Spool(table_path(folder, CONFUSION, run_id), SCHEMAS[CONFUSION]) as spool:
        for confused in confusion:
            spool.append((run_id, *confused))
        spool.finish()
