"""The measuring stage: the published answers are held against the expected ones, where a job names these."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from batchinfer.data.accuracy.measured import Accuracy, Tally, measured
from batchinfer.data.accuracy.reliability import BINS, Reliability
from batchinfer.data.results.manifest import Manifest
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.report.tables.accuracy import FieldAccuracy, ProbableRows, write_accuracy


def measure(run: OpenRun, manifest: Manifest) -> None:
    """Measure the result that was just published, and write what was found into the report: into the run's row, and
    into tables. Nothing happens without `input.expected`. Raises InputCorrupt, OSError."""
    if run.job.input.expected is None:
        return
    files = [Path(run.state.results, file.name) for file in manifest.files]
    found = measured(files)
    assert found is not None, "the published column is marked"
    if found.notice is not None:
        run.notice(found.notice)
    whole = _figures(None, found.whole)
    run.report.note(
        labelled_rows=whole.labelled_rows,
        labelled_errors=whole.labelled_errors,
        unlabelled_rows=found.unlabelled,
        unreadable_labels=found.unreadable,
        exact_rows=whole.exact_rows,
        normalised_rows=whole.normalised_rows,
    )
    calibration = found.calibration or Reliability()
    run.report.note(
        mean_probability=calibration.mean_probability,
        calibration_error=calibration.expected_error,
        brier_score=calibration.brier_score,
    )
    confusion = (astuple(one) for one in found.confusion)
    tables = _by_field(found), confusion, _by_probability(calibration)
    write_accuracy(run.report.folder, run.report.identity["run_id"], *tables)


def _by_field(found: Accuracy) -> list[FieldAccuracy]:
    return [_figures(None, found.whole), *(_figures(name, one) for name, one in found.fields.items())]


def _by_probability(found: Reliability) -> list[ProbableRows]:
    """Return the rows of each bin; none where no answer has a probability."""
    if not found.rows:
        return []
    return [
        ProbableRows(
            at / BINS, (at + 1) / BINS, one.rows, one.right, one.probability / one.rows if one.rows else None
        )
        for at, one in enumerate(found.bins)
    ]


def _figures(field: str | None, tally: Tally) -> FieldAccuracy:
    return FieldAccuracy(field, tally.rows, tally.errors, tally.exact, tally.normalised)
