"""The reading stage: reads the input, renders prompts and writes the index."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, replace

from batchinfer.filesystem.json_files import write_strings
from batchinfer.input.reader import Reader
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.stages.early_loading import EarlyLoading
from batchinfer.pipeline.stages.verdict import refuse_hopeless
from batchinfer.pipeline.workers.interrupts import CONTINUES
from batchinfer.plan.setup.input_check import check_enough_rows, check_input
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import Ingestion, IngestProgress, index_or_ingestion
from batchinfer.store.index.keeping import KeptIndexReuse
from batchinfer.store.kept.files import remove_strays
from batchinfer.store.results.openai import LINE_BYTES
from batchinfer.store.results.partial import PARTIAL
from batchinfer.store.results.reuse.answered import AnsweredRows
from batchinfer.store.results.reuse.finished_segments import FinishedSegments

_LITTLE_BYTES = 1 << 20  # of an input; reading them takes less time than reading the keys of a large store


@dataclass(frozen=True, slots=True)
class UnreadInput:
    """An input that was only read in part. Its rows will run in waves while the rest is read.

    Attributes:
        ingestion: The object that reads the input and writes the index.
        steps: Iterator over the remaining steps of the ingestion. Each step reads a part of the input.
        at: Progress of the ingestion before these steps.
    """

    ingestion: Ingestion
    steps: Generator[IngestProgress, None, None]
    at: IngestProgress


def check(run: OpenRun) -> Reader | None:
    """Check that the input can be read and has the columns that the job names. Warnings are shown to the user.

    Args:
        run: The run, with its job, options, state folder and report.

    Returns:
        A reader of the input files, which `read_input` reuses. None for a query.
    """
    run.operators.notify_progress()
    run.progress.phase("reading", run.job.input.limit)
    with run.report.timed("ingest_s"):
        facts = check_input(run.job, run.setup, run.state)
        for line in facts.warnings:
            run.notice(line)
    return facts.reader


def read_input(
    run: OpenRun, context: bytes, store: CompletionStore, checked: Reader | None
) -> Index | UnreadInput:
    """Read, render and tokenise the input. Engines load in parallel if the store lacks answers.

    Args:
        run: The run, with its job, options, state folder and report.
        context: The first part of all work keys, from `work_context`.
        store: The store of answers.
        checked: The reader that `check` returned.

    Returns:
        The index of all rows. If engines are ready while the rest of the input still takes long to read, the unread
            rest instead.
    """
    with run.report.timed("ingest_s"):
        options = replace(run.setup.ingest_options(context, run.now), checked=checked)
        found = index_or_ingestion(
            run.job,
            run.setup.tokenizer,
            options,
            run.state.scratch,
            run.state.ops,
            run.report.record_activity,
            _keeping(run, store),
        )
        early = EarlyLoading(run, store)
        if isinstance(found, Index):
            early.look_in_index(found)
            return complete(run, found)
        unread = _read(run, found, early)
        return unread or complete(run, found.finish())


def complete(run: OpenRun, index: Index) -> Index:
    """Check the index of the whole input, and delete temporary files of other inputs.

    The paths of the model and of the store of answers are recorded in the folder of the index.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.

    Returns:
        `index`.

    Raises:
        TooFewRows: The input has fewer rows than the job requires.
        ErrorBudgetExceeded: Too many rows of the input are errors.
        StorageError: There is too little disk space for the file of --to-openai.
    """
    run.state.purge_scratch(keep=index.folder.name)
    where = {"model": str(run.job.model.path), "completions": str(run.state.completions)}
    write_strings(index.folder / PARTIAL, where, run.state.ops)
    run.report.note(rows=index.rows)
    check_enough_rows(run.job, index.input_rows)
    for line in index.notices:
        run.notice(line)
    if run.openai is not None:
        run.openai.check_space(index.rows * LINE_BYTES)
    refuse_hopeless(run, index)
    return index


def _keeping(run: OpenRun, store: CompletionStore) -> KeptIndexReuse | None:
    # None for a trial, which has too few rows to be reused
    if run.options.limit is not None:
        return None
    state = run.state
    with state.lock_shared():
        if state.parts_in_use() == [state.path]:
            remove_strays(state.kept, state.ops)
    answered = AnsweredRows(store.parts(), run.options.retry_errors, state.staging / "answered")
    whole = FinishedSegments(state.kept, store.parts(), run.options.retry_errors, run.notice)
    return KeptIndexReuse(state.kept, answered, run.notice, run.options.verify, whole)


def _read(run: OpenRun, ingestion: Ingestion, early: EarlyLoading) -> UnreadInput | None:
    # Returns the rest of the input if its rows should run in waves, None after the end of the input
    steps, began = ingestion.steps(), time.monotonic()
    try:
        for at in steps:
            run.interrupts.raise_pending(CONTINUES)
            run.progress.read(at.rows, at.bytes_read, at.bytes_total)
            early.look_for_missing(at.keys, last=at.bytes_total - at.bytes_read <= _LITTLE_BYTES)
            left_s = _left_s(run, at, time.monotonic() - began)
            if ingestion.is_final and early.can_run_waves(left_s):
                return UnreadInput(ingestion, steps, at)
    except BaseException:
        steps.close()
        raise
    return None


def _left_s(run: OpenRun, at: IngestProgress, passed_s: float) -> float:
    share, limit = at.bytes_read / max(1, at.bytes_total), run.job.input.limit
    if limit is not None:
        share = max(share, at.rows / limit)
    return passed_s * (1 - share) / share if 0 < share < 1 else 0.0
