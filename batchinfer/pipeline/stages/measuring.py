"""The measuring stage: sums up the published answers, and compares them with expected answers, if any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.report.tables.accuracy import FieldAccuracy, ProbableRows, write_accuracy
from batchinfer.store.accuracy.aggregates import summarise
from batchinfer.store.accuracy.measure import Accuracy, Tally, measure_accuracy
from batchinfer.store.accuracy.reliability import BINS, Reliability
from batchinfer.store.results.manifest import Manifest


def measure(run: OpenRun, manifest: Manifest) -> None:
    """Compute aggregates of the published result, such as its accuracy, and record them in the report.

    Args:
        run: The run, with its job, options, state folder and report.
        manifest: The manifest of the published result.

    Raises:
        InputCorrupt: A file of the result cannot be read.
        StorageError: A query failed, or a table cannot be written.
        OutOfMemory: There is too little memory.
        OSError: A table cannot be written.
    """
    files = [Path(run.state.results, file.name) for file in manifest.files]
    run.report.note(**_answers(run, files))
    if run.job.input.expected is not None:
        _compare(run, files)


def _answers(run: OpenRun, files: Sequence[Path]) -> dict[str, Any]:
    asked, aggregates = run.setup.requested, dict(run.setup.output.aggregates)
    if asked.scoring is not None and asked.scoring.own_labels:
        aggregates.pop("labels", None)  # labels are texts of rows, which reports must not contain
    found = summarise(files, aggregates, run.state.staging / "figures") if files else {}
    if run.job.task == "embed" and asked.embedding is not None and not run.job.requests:
        found["dimensions"] = asked.embedding.dimensions
    return found


def _compare(run: OpenRun, files: Sequence[Path]) -> None:
    found = measure_accuracy(files)
    assert found is not None, "the published column is marked"
    if found.notice is not None:
        run.notice(found.notice)
    whole = _field_accuracy(None, found.overall)
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
    return [
        _field_accuracy(None, found.overall),
        *(_field_accuracy(name, one) for name, one in found.fields.items()),
    ]


def _by_probability(found: Reliability) -> list[ProbableRows]:
    if not found.rows:
        return []
    return [
        ProbableRows(
            at / BINS, (at + 1) / BINS, one.rows, one.right, one.probability / one.rows if one.rows else None
        )
        for at, one in enumerate(found.bins)
    ]


def _field_accuracy(field: str | None, tally: Tally) -> FieldAccuracy:
    return FieldAccuracy(field, tally.rows, tally.errors, tally.exact, tally.normalised)
