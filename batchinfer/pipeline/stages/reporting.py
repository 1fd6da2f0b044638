"""The report of a run: written however the run ends, with its progress on record until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.progress_file import ProgressFile
from batchinfer.pipeline.report import told_by
from batchinfer.report.tables.folder import writing


@contextmanager
def reported(run: OpenRun) -> Iterator[None]:
    """Write the report of a run whose stages pass within the block, and `last_run.json`.

    Signals that came during a query are raised as Interrupted.
    """
    record = ProgressFile(run.state, run.report.identity, run.notice)
    with writing(run.report.folder, run.state.report_lock):
        record.begin()
        run.progress.recorded_by(record)
        try:
            with run.interrupts.retold():
                yield
        except BaseException as error:
            _report_failure(run, record, error)
            raise
        finally:
            run.progress.recorded_by(None)
            run.progress.close()
        with run.interrupts.deferred():
            run.report.close()
            with told_by(run.notice):
                _leave_word(run, record)


def _report_failure(run: OpenRun, record: ProgressFile, error: BaseException) -> None:
    with run.interrupts.deferred(), told_by(run.notice):
        run.interrupts.ignore_stop()
        run.progress.record()  # what was done since it was last on record
        run.report.failed(error)
        try:
            run.report.close()
        finally:
            _leave_word(run, record)


def _leave_word(run: OpenRun, record: ProgressFile) -> None:
    """Say how the run ended where other programs look for it. Raises OSError, StorageError."""
    row = run.report.row
    record.ended(row["exit_code"], row["exit_status"])
    with run.state.lock_shared():  # runs for other dates write it, too
        run.report.write_last(run.state.ops)
