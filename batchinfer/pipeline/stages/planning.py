"""The planning stage: plans and forecasts the requests without a stored answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.workers.interrupts import CONTINUES
from batchinfer.plan.forecast.deadline import Deadline, DeadlineWatch
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.forecast.run import RevisedForecast, RunForecast, add_earlier_answers, forecast_run
from batchinfer.plan.forecast.text import plan_line
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.planned_work import Announcement, announce_plans, find_similar_runs, wait_for


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The plan of a run with its forecasts.

    Attributes:
        plan: The plan of the missing answers.
        deadline: Watches the job's deadline. None if the job has none.
        revised: Revises the forecast from the first answers.
        forecast_s: Forecast engine time in seconds. None if there is no forecast.
        without: Parquet files of the store that have no answer to any row of this plan. Publishing need not search
            them.
    """

    plan: Plan
    deadline: DeadlineWatch | None
    revised: RevisedForecast
    forecast_s: float | None
    without: Sequence[Path]


@contextmanager
def plan_run(run: OpenRun, index: Index, store: CompletionStore) -> Iterator[PlannedRun]:
    """Plan the missing answers of a run. Within the block, the plan is announced to other runs of the same store.

    If another run already computes some of these requests, this run waits until the other one has finished, and plans
    again.

    Args:
        run: The run, with its job, options, state folder and report.
        index: The index of all rows.
        store: The store of answers.
    """
    first = _plan(run, index, store, "plan")
    with announce_plans(store.path, [first.plan.path], run.state.ops) as announcement:
        yield _without_others(run, first, announcement, index, store)


def _without_others(
    run: OpenRun, first: PlannedRun, announcement: Announcement, index: Index, store: CompletionStore
) -> PlannedRun:
    others = announcement.others if first.plan.to_run else []
    known, same = store.parts(), find_similar_runs(first.plan.path, others, run.state.staging / "others")
    if same:
        run.progress.phase("waiting")
        run.launch.end()  # frees memory for the other run
        run.notice(f"another run is already computing these rows (in {store.path}); waiting for it")
        wait_for(same, partial(_wait, run))
    store.refresh()
    return first if store.parts() == known else _plan(run, index, store, "plan-of-the-rest")


def _wait(run: OpenRun) -> None:
    run.progress.tick()
    run.interrupts.raise_pending(CONTINUES)


def _plan(run: OpenRun, index: Index, store: CompletionStore, folder: str) -> PlannedRun:
    run.progress.phase("planning")
    with run.report.timed("plan_s"):
        _warn_of_no_retries(run, index, store)
        parts = store.parts()
        plan = plan_job(
            index.index_parts,
            index.tokens,
            parts,
            index.folder / folder,
            run.setup.roots,
            attempts=index.attempts,
            reused=index.reused,
            extra_prompts=index.content_free_parts,
            shares=run.setup.setting.parts.shares_prefixes,
            retry_errors=run.options.retry_errors,
            threads=usable_cpus(),
        )
        whole = run.setup.drafting is None  # otherwise a draft model runs first
        forecast = forecast_run(run.job, run.setup, plan, index.tokens, whole=whole)
        forecast = add_earlier_answers(forecast, run.setup, run.state, plan, index.tokens, parts)
    run.report.record_plan(plan, forecast.engine)
    run.progress.close()
    notify_plan(run, plan, forecast)
    deadline = _deadline(run, plan, index, forecast.engine)
    run.report.note(**({} if deadline is None else deadline.facts))
    nothing = plan.rows_to_run == _new_rows(index) and index.attempts == 1 and not run.options.retry_errors
    forecast_s = None if forecast.engine is None else forecast.engine.seconds
    revised = revised_forecast(run, forecast)
    return PlannedRun(plan, deadline, revised, forecast_s, parts if nothing else ())


def _new_rows(index: Index) -> int:
    return index.rows - index.error_rows - (index.reused.rows - index.reused.errors)


def notify_plan(run: OpenRun, plan: Plan, forecast: RunForecast) -> None:
    """Show the user the counts of a plan and its forecast.

    Args:
        run: The run, with its job, options, state folder and report.
        plan: The plan.
        forecast: The forecast of the plan.
    """
    for line in (plan_line(plan), *forecast.lines):
        run.notice(line)
    if run.job.attempts > 1 and plan.to_run:
        run.notice(
            f"on_invalid: a row runs up to {run.job.attempts} times; the plan has the attempts that are due now"
        )
    if run.job.sampling.from_columns:
        run.notice(f"rows set their own {run.job.sampling.row_parameters()}")


def revised_forecast(run: OpenRun, forecast: RunForecast, began: float | None = None) -> RevisedForecast:
    """Return an object that makes a new forecast from the first answers of a run.

    The object makes none if the plan's forecast exists and does not assume max_tokens for every answer.

    Args:
        run: The run, with its job, options, state folder and report.
        forecast: The forecast of the plan.
        began: When engines started to run rows, a time of `time.monotonic`. None if they have not.
    """
    return RevisedForecast(forecast.engine is None or forecast.engine.upper_bound, run.notice, began=began)


def _warn_of_no_retries(run: OpenRun, index: Index, store: CompletionStore) -> None:
    if not run.options.retry_errors:
        return
    spill, attempts = run.state.staging / "join", index.attempts
    if not join_answers(index.index_parts, store.parts(), spill, attempts=attempts).counts.retryable:
        run.notice("--retry-errors: no row has an error that is marked retryable; no row runs again")


def _deadline(
    run: OpenRun, plan: Plan, index: Index, forecast: EngineForecast | None
) -> DeadlineWatch | None:
    first, drafts = None, run.setup.first_draft_model
    if run.job.deadline is not None and drafts is not None and run.setup.drafting is not None:
        drafting = forecast_run(drafts.job, run.setup.drafting, plan, index.tokens)
        first, forecast = drafting.engine, None if drafting.engine is None else forecast
    found = Deadline.of(run.job, run.now, forecast, first=first)
    if found is not None and plan.to_run:
        run.notice(f"deadline: {found.text}")
    return None if found is None else DeadlineWatch(found, run.notice)
