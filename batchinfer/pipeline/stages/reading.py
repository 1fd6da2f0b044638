"""The input, read: its rows become prompts, and the prompts an index."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.data.index.index import Index
from batchinfer.data.index.ingest import IngestProgress, ingest
from batchinfer.data.index.keeping import Keeping
from batchinfer.data.input.reader import Reader
from batchinfer.data.kept.files import remove_strays
from batchinfer.data.results.answered import AnsweredRows
from batchinfer.data.results.partial import PARTIAL
from batchinfer.data.storage.remembered import write_strings
from batchinfer.data.store.completion_store import CompletionStore
from batchinfer.pipeline.stages.early_loading import EarlyLoading
from batchinfer.pipeline.stages.open_run import OpenRun
from batchinfer.plan.setup.input_check import check_input


def check(run: OpenRun) -> Reader | None:
    """Check the input as far as that needs no more than the beginning of each file. Return what has read these; None
    for a query."""
    run.operators.look()
    run.progress.phase("reading", run.job.input.limit)
    with run.report.timed("ingest_s"):
        facts = check_input(run.job, run.setup, run.state)
        for line in facts.warnings:
            run.notice(line)
    return facts.reader


def read_input(run: OpenRun, context: bytes, store: CompletionStore, checked: Reader | None) -> Index:
    """Return the complete index of the input's rows; the scratch of other inputs is deleted. Engines load meanwhile, if
    the store lacks a key. `checked`: what `check` returned."""
    with run.report.timed("ingest_s"):
        index = _index(run, context, store, checked)
        run.state.purge_scratch(keep=index.folder.name)
        where = {"model": str(run.job.model.path), "completions": str(run.state.completions)}
        write_strings(index.folder / PARTIAL, where, run.state.ops)
    run.report.note(rows=index.rows)
    for line in index.notices:
        run.notice(line)
    return index


def _keeping(run: OpenRun, store: CompletionStore) -> Keeping | None:
    """Return where the job keeps what it knows of its rows. A trial knows only a few, and keeps nothing."""
    if run.options.limit is not None:
        return None
    state = run.state
    with state.exclusively():
        if state.parts_in_use() == [state.path]:
            remove_strays(state.kept, state.ops)
    answered = AnsweredRows(store.parts(), run.options.retry_errors, state.staging / "answered")
    return Keeping(state.kept, answered, run.notice, run.options.verify)


def _index(run: OpenRun, context: bytes, store: CompletionStore, checked: Reader | None) -> Index:
    early = EarlyLoading(run, store)
    options, rows = replace(run.setup.ingest_options(context, run.now), checked=checked), 0

    def read(at: IngestProgress) -> None:
        nonlocal rows
        rows = at.rows
        run.progress.read(at.rows, at.bytes_read, at.bytes_total)
        early.read(at.keys)

    index = ingest(
        run.job,
        run.setup.tokenizer,
        options,
        run.state.scratch,
        read,
        run.state.ops,
        run.report.happened,
        _keeping(run, store),
    )
    if not rows:
        early.found(index)
    return index
