"""The publishing stage: joins stored answers with the rows, publishes the result, and removes temporary files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.errors import InputCorrupt, OutputConflict, StorageError
from batchinfer.core.hub import short_name
from batchinfer.input.input_file import InputFile
from batchinfer.input.job_input import open_input
from batchinfer.pipeline.clean import clean_after_run, note_use
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.report import errors_as_notice
from batchinfer.pipeline.stages.identity import publish_spec
from batchinfer.pipeline.stages.measuring import measure
from batchinfer.report.tables.row_keys import RowKeysWriter
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.outputs.best_samples import published_rows
from batchinfer.store.outputs.content_free import calibrated_scoring
from batchinfer.store.results.join import Join, find_completion
from batchinfer.store.results.manifest import Manifest
from batchinfer.store.results.openai import read_request_fields, write_openai
from batchinfer.store.results.published import open_if_intact
from batchinfer.store.results.published_inputs import identities, remember_inputs
from batchinfer.store.results.publisher import publish
from batchinfer.store.results.reuse.finished_segments import record_finished

KeepKeys = Callable[[Join], None]


@contextmanager
def row_keys_table(run: OpenRun, index: Index) -> Iterator[KeepKeys]:
    """Write the report's table of rows in parallel with the block.

    Yields a function that completes the table. Call it after publishing, with the join of the index and the store. It
    may raise OSError. If it is not called, the table is dropped.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.
    """
    if index.attempts > 1:
        yield lambda join: run.report.keep_keys(index.index_parts, _attempts(join), index.row_ids)
        return
    with run.report.start_row_keys(index.index_parts, index.row_ids) as table:
        yield lambda _: _finished(table)


def _finished(table: RowKeysWriter) -> None:
    table.finish()


def _attempts(join: Join) -> NDArray[np.uint8]:
    return np.ones(join.counts.rows, np.uint8) if join.attempts is None else join.attempts


def publish_result(
    run: OpenRun, context: bytes, index: Index, store: CompletionStore, join: Join, keep_keys: KeepKeys
) -> tuple[Manifest, bool]:
    """Publish the result of a run.

    Args:
        run: The run, with its job, options, state folder and report.
        context: The first part of all work keys, from `work_context`.
        index: The index of all rows.
        store: The store of answers.
        join: The stored answer of each row: the join of the index with the store.
        keep_keys: Completes the report's table of rows, see `row_keys_table`.

    Returns:
        The manifest of the result, and True if this run started engines or the result differs from the one before.

    Raises:
        BatchInferError: The result cannot be published.
    """
    run.progress.phase("publishing", published_rows(index.best, index.rows))
    index.check_inputs_unchanged()
    older, inputs = open_if_intact(run.state.destination), identities(index)
    note_use(run.state, run.job.cache.keep, join, store)
    manifest = publish(
        index,
        join,
        publish_spec(run, context, inputs),
        run.setup.tokenizer,
        run.state,
        replace=run.options.replace,
        remember=run.options.limit is None,  # a trial has too few rows to be reused
        on_rows=run.progress.rows,
    )
    if not run.job.input.sql:
        remember_inputs(run.state.published, index.inputs, inputs, run.state.ops)
    if run.options.limit is None:
        _settle(run, index, join)
    same = older is not None and older.manifest.generation == manifest.generation
    changed = not same or run.report.has_meter
    if changed:
        with errors_as_notice(run.notice):
            keep_keys(join)
            measure(run, manifest)
    return manifest, changed


def _settle(run: OpenRun, index: Index, join: Join) -> None:
    # Lets the next run reuse whole input files. The result is published, so a failing disk no longer fails the
    # run.
    try:
        record_finished(run.state.kept, index, join, run.state.ops)
    except StorageError as error:
        run.notice(f"the results are published, but the next run cannot reuse whole files: {error}")


def with_calibration(index: Index, join: Join, spill: Path) -> tuple[Index, Join]:
    """Apply `classify.calibrate`: adjust the scores of labels by their scores after a prompt without content.

    Args:
        index: The index of all rows.
        join: The stored answer of each row: the join of the index with the store.
        spill: A folder for temporary files of queries.

    Returns:
        The index, whose scoring is adjusted, and the join, which also marks the answer to that prompt as used. Both are
            unchanged without `classify.calibrate`.

    Raises:
        BatchInferError: That prompt has no answer.
    """
    if not index.content_free_parts or index.scoring is None:
        return index, join
    found = find_completion(index.content_free_parts, join.parts, spill)
    scoring = calibrated_scoring(index.scoring, found and found[:2])
    used = join.others if found is None else np.append(join.others, found[2])
    return replace(index, scoring=scoring), replace(join, others=used)


def tidy(run: OpenRun) -> None:
    """Delete temporary files of the run, and stored answers that no result has used for `cache.keep` days.

    A signal stops this early.

    Args:
        run: The run, with its job, options, state folder and report.
    """
    run.state.purge_scratch()
    clean_after_run(run.state, run.job.cache.keep, lambda: run.interrupts.pending is None, run.notice)


def write_openai_file(run: OpenRun, files: Sequence[InputFile]) -> None:
    """Write the file of --to-openai from the published result. Does nothing without that option.

    Args:
        run: The run, with its job, options, state folder and report.
        files: The input files.

    Raises:
        BatchInferError: The file cannot be written. The message says that the results are published.
    """
    if run.openai is None:
        return
    rows = read_request_fields(open_input(run.job, files), run.job.input.limit)
    created = int(run.now.timestamp()) if run.options.openai_timestamps else 0
    try:
        name, tokens = short_name(run.job.model.path), run.setup.tokenizer.single
        kind = run.setup.output
        write_openai(run.state.destination, run.openai, rows, tokens, kind, model=name, created=created)
    except (StorageError, OutputConflict, InputCorrupt) as error:
        raise type(error)(
            f"{error}. The results are published in {run.state.results}; only the file of --to-openai is "
            "missing: the same command writes it without computing anything again"
        ) from error
