"""The stages of a run in order, from the checked job to the published result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from batchinfer.filesystem.durable import storage
from batchinfer.input.job_input import input_files
from batchinfer.job import Job
from batchinfer.pipeline.open_run import OpenRun, open_run
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.stages.answering import answer
from batchinfer.pipeline.stages.answering_in_waves import answer_in_waves
from batchinfer.pipeline.stages.calibrating import calibrate_weights, check_quality
from batchinfer.pipeline.stages.drafting import prepare_drafts
from batchinfer.pipeline.stages.earlier_result import earlier_result
from batchinfer.pipeline.stages.planning import plan_run
from batchinfer.pipeline.stages.publishing import (
    KeepKeys,
    publish_result,
    row_keys_table,
    tidy,
    with_calibration,
    write_openai_file,
)
from batchinfer.pipeline.stages.reading import check, read_input
from batchinfer.pipeline.stages.reporting import report_run
from batchinfer.pipeline.stages.storing import open_store
from batchinfer.pipeline.stages.verdict import judge_result, refuse_stored_errors, refuse_to_publish
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.plan.setup.job_setup import work_context
from batchinfer.report.progress import Progress
from batchinfer.report.tables.exit_status import ALREADY_PUBLISHED, PUBLISHED
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.manifest import Manifest


def run_job(
    job: Job, options: RunOptions, progress: Progress, interrupts: Interrupts, notice: Callable[[str], None]
) -> Outcome:
    """Run a job, or continue an earlier run of it. Returns the outcome: exit code, row of the run table and message.

    Args:
        job: The job.
        options: The options of the run.
        progress: The progress display.
        interrupts: Handles signals and the stop time.
        notice: Called with lines for the user.

    Raises:
        BatchInferError: The run failed. Answers that were finished before are stored.
    """
    with open_run(job, options, progress, interrupts, notice) as run, report_run(run), run.launch:
        _prepare(run)
        run = calibrate_weights(run)
        context = work_context(run.setup, run.state, remember=True)
        earlier = earlier_result(run, context)
        if earlier is not None:
            return _nothing_to_do(run, earlier)
        checked = check(run)
        with open_store(run) as store:
            found = read_input(run, context, store, checked)
            index = found if isinstance(found, Index) else answer_in_waves(run, found, store)
            with row_keys_table(run, index) as keep_keys:
                without = _answer(run, index, store) if index is found else ()
                manifest, changed = _publish(run, context, index, store, keep_keys, without)
        return _finish(run, index, manifest, changed)


def _prepare(run: OpenRun) -> None:
    run.state.remember_store()
    run.state.remove_old_generations()
    run.state.remove_idle()
    if run.openai is not None:
        run.openai.probe()


def _nothing_to_do(run: OpenRun, manifest: Manifest) -> Outcome:
    run.interrupts.ignore_stop()
    write_openai_file(run, input_files(run.job))
    with storage(run.state.published, "touch"):
        run.state.ops.touch(run.state.published)  # the folder's time is when its answers were last used
    return _unreported(run, judge_result(run, manifest, ALREADY_PUBLISHED))


def _answer(run: OpenRun, index: Index, store: CompletionStore) -> Sequence[Path]:
    # Returns the files of the store before the run if they have no answer to any new row, see
    # `PlannedRun.without`
    with plan_run(run, index, store) as work:
        if work.plan.to_run:
            failed = refuse_stored_errors(run, index, store.parts())
            check_quality(run, work.forecast_s)
            answer(run, work, index, store, prepare_drafts(run, work.plan, index, store), failed)
        else:
            with run.report.timed("close_s"):
                run.launch.end()
        return work.without


def _publish(
    run: OpenRun,
    context: bytes,
    index: Index,
    store: CompletionStore,
    keep_keys: KeepKeys,
    without: Sequence[Path],
) -> tuple[Manifest, bool]:
    # The bool is True if this run changed anything
    run.interrupts.ignore_stop()  # the stop time does not interrupt publishing
    with run.report.timed("publish_s"):
        store.refresh()  # trials and runs for other dates may have added answers
        spill, attempts = run.state.staging / "join", index.attempts
        join = join_answers(
            index.index_parts,
            store.parts(),
            spill,
            attempts=attempts,
            reused=index.reused,
            without=without,
        )
        refuse_to_publish(run, index, join)
        index, join = with_calibration(index, join, spill)
        return publish_result(run, context, index, store, join, keep_keys)


def _finish(run: OpenRun, index: Index, manifest: Manifest, changed: bool) -> Outcome:
    with run.interrupts.deferred(), run.report.timed("close_s"):
        tidy(run)  # deferred: a signal after publishing interrupts neither the cleanup nor the report
    if run.openai is not None:
        run.interrupts.raise_pending(
            "interrupted; the results are published, and the same command writes the --to-openai file"
        )
    with run.report.timed("publish_s"):
        write_openai_file(run, index.inputs)
    with run.interrupts.deferred(), run.report.timed("close_s"):
        outcome = judge_result(run, manifest, PUBLISHED)
        return outcome if changed else _unreported(run, outcome)


def _unreported(run: OpenRun, outcome: Outcome) -> Outcome:
    run.report.discard()
    return replace(outcome, report=None)
