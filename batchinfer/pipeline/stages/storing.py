"""Opens the store of answers of a run."""

from __future__ import annotations

from batchinfer.engine.config import NUMERICS_VERSION
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.store.answers.completion_store import CompletionStore


def open_store(run: OpenRun) -> CompletionStore:
    """Open the store of a job's answers. Damaged files of the store are dropped, each with a notice to the user."""
    with run.report.timed("plan_s"):
        store = CompletionStore(
            run.state.completions,
            numerics=NUMERICS_VERSION,
            rows=None if run.job.commit.rows == "auto" else run.job.commit.rows,
            seconds=run.job.commit.seconds,
            verify=run.options.verify,
            digests=True,
            ops=run.state.ops,
        )
    for lost in store.discarded:
        run.notice(f"{lost.path}: {lost.reason}; its rows run again")
    return store
