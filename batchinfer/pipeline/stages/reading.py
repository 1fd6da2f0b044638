"""The input, read: its rows become prompts, and the prompts an index."""

from __future__ import annotations

from batchinfer.data.index.index import Index
from batchinfer.data.index.ingest import IngestProgress, ingest
from batchinfer.data.results.partial import PARTIAL
from batchinfer.data.storage.remembered import write_strings
from batchinfer.pipeline.stages.open_run import OpenRun
from batchinfer.plan.setup.input_check import check_input


def read_input(run: OpenRun, context: bytes) -> Index:
    """Check the input, and return the complete index of its rows; the scratch of other inputs is deleted."""
    run.operators.look()
    run.progress.phase("reading", run.job.input.limit)
    with run.report.timed("ingest_s"):
        for line in check_input(run.job, run.setup, run.state).warnings:
            run.notice(line)
        index = _index(run, context)
        run.state.purge_scratch(keep=index.folder.name)
        where = {"model": str(run.job.model.path), "completions": str(run.state.completions)}
        write_strings(index.folder / PARTIAL, where, run.state.ops)
    run.report.note(rows=index.rows)
    return index


def _index(run: OpenRun, context: bytes) -> Index:
    options = run.setup.ingest_options(context, run.now)

    def read(at: IngestProgress) -> None:
        run.progress.read(at.rows, at.bytes_read, at.bytes_total)

    return ingest(run.job, run.setup.tokenizer, options, run.state.scratch, read, run.state.ops)
