"""Writes the report of a run when it ends, also after a failure, and its progress until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.progress_file import ProgressFile
from batchinfer.pipeline.report import errors_as_notice
from batchinfer.report.tables.folder import lock_for_writing


@contextmanager
def report_run(run: OpenRun) -> Iterator[None]:
    """Write the progress of a run during the block, and its report and `last_run.json` at the end of the block.

    The report is also written if the block raises. If a signal came during a DuckDB query, Interrupted is raised
    instead of DuckDB's error.

    Args:
        run: The run, with its job, options, state folder and report.
    """
    record = ProgressFile(run.state, run.report.identity, run.notice)
    with lock_for_writing(run.report.folder, run.state.report_lock):
        record.write_start()
        run.progress.recorded_by(record)
        try:
            with run.interrupts.reraised():
                yield
        except BaseException as error:
            _report_failure(run, record, error)
            raise
        finally:
            run.progress.recorded_by(None)
            run.progress.close()
        with run.interrupts.deferred():
            run.report.close()
            with errors_as_notice(run.notice):
                _record_end(run, record)


def _report_failure(run: OpenRun, record: ProgressFile, error: BaseException) -> None:
    with run.interrupts.deferred(), errors_as_notice(run.notice):
        run.interrupts.ignore_stop()
        run.progress.record()  # the progress since it was last written
        run.report.complete_failed(error)
        try:
            run.report.close()
        finally:
            _record_end(run, record)


def _record_end(run: OpenRun, record: ProgressFile) -> None:
    row = run.report.row
    record.write_end(row["exit_code"], row["exit_status"])
    with run.state.lock_shared():  # runs for other dates may write last_run.json at the same time
        run.report.write_last(run.state.ops)
