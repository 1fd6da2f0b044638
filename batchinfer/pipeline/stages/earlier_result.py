"""Detects that an earlier run already published the result of this run."""

from __future__ import annotations

from batchinfer.input.job_input import input_files
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.stages.identity import publish_spec
from batchinfer.pipeline.stages.storing import open_store
from batchinfer.plan.setup.input_check import check_enough_rows
from batchinfer.store.results.manifest import Manifest, is_published
from batchinfer.store.results.published import count_published_input_rows, open_published_or_notify
from batchinfer.store.results.published_inputs import read_published_inputs


def earlier_result(run: OpenRun, context: bytes) -> Manifest | None:
    """Return the manifest of the published result if this run would publish the same result again, else None.

    The published result must be complete, and neither the job nor its input may have changed. Returns None for a job
    with a query (input.sql), because a query may return other rows each time.

    Args:
        run: The run, with its job, options, state folder and report.
        context: The first part of all work keys, from `work_context`.

    Raises:
        TooFewRows: The result has fewer rows than the job now requires.
    """
    found = open_published_or_notify(run.state.destination, run.notice, fresh=run.options.verify)
    if found is None or run.job.input.sql or run.options.retry_errors or _has_lost_answers(run):
        return None
    inputs = read_published_inputs(run.state.published, input_files(run.job))
    current = inputs is not None and is_published(run.state.destination, publish_spec(run, context, inputs))
    if not current:
        return None
    check_enough_rows(run.job, count_published_input_rows(run.state.destination) or 0)
    return found.manifest


def _has_lost_answers(run: OpenRun) -> bool:
    if not run.options.verify or not run.state.completions.is_dir():
        return False
    with open_store(run) as store:
        return bool(store.discarded)
