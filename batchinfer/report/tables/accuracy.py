"""Writes the report tables of accuracy: by field, by label and by probability."""

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
    compute_formulas,
)
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool


@dataclass(frozen=True, slots=True)
class FieldAccuracy:
    """The accuracy of one field of a run's answers, in rows.

    Attributes:
        field: The field, or None for whole answers.
        labelled_rows: Rows with an expected answer.
        labelled_errors: Error rows among them.
        exact_rows: Rows whose answer is the expected one.
        normalised_rows: Rows whose answer is the expected one at least after normalisation.
    """

    field: str | None
    labelled_rows: int
    labelled_errors: int
    exact_rows: int
    normalised_rows: int


@dataclass(frozen=True, slots=True)
class ProbableRows:
    """Counts of rows whose answers have a probability in one range, and an expected answer.

    Attributes:
        from_probability: Lower bound of the range.
        to_probability: Upper bound of the range.
        rows: Number of rows.
        right_rows: Number of rows with the right answer.
        mean_probability: Mean probability of the answers; None without rows.
    """

    from_probability: float
    to_probability: float
    rows: int
    right_rows: int
    mean_probability: float | None


ConfusedRows = tuple[str | None, str, str, str | None, int]  # field, expected, outcome, answer, rows


def write_accuracy(
    folder: Path,
    run_id: str,
    fields: Iterable[FieldAccuracy],
    confusion: Iterable[ConfusedRows],
    probable: Iterable[ProbableRows],
) -> None:
    """Write the report tables `accuracy`, `confusion` and `calibration` of a run, each atomically.

    Args:
        folder: The folder of report tables.
        run_id: The id of the run.
        fields: The rows of `accuracy`.
        confusion: The rows of `confusion`: field, expected label, outcome, answered label and number of rows.
        probable: The rows of `calibration`.

    Raises:
        OSError: A table cannot be written.
    """
    make_folder(folder)
    for table, rows in ((ACCURACY, fields), (CALIBRATION, probable)):
        with Spool(table_path(folder, table, run_id), SCHEMAS[table]) as spool:
            for one in rows:
                row = {"run_id": run_id} | {name: getattr(one, name) for name in type(one).__slots__}
                spool.append(tuple(compute_formulas(row, COLUMNS[table]).values()))
            spool.finish()
    with Spool(table_path(folder, CONFUSION, run_id), SCHEMAS[CONFUSION]) as spool:
        for confused in confusion:
            spool.append((run_id, *confused))
        spool.finish()
