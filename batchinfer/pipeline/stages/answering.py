"""The answering stage: starts engines, feeds them the requests of the plan, and collects their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from batchinfer.core.errors import StopTimeReached
from batchinfer.core.wording import counted
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.filesystem.death_log import DeathLog
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.earlier_drafts import AddDrafts, last_answers
from batchinfer.pipeline.plans.further_attempts import FurtherAttempts
from batchinfer.pipeline.plans.run_plans import RunPlans
from batchinfer.pipeline.stages.planning import PlannedRun
from batchinfer.pipeline.stages.verdict import error_budget
from batchinfer.pipeline.stop_text import continue_text, rows_left_text, stop_reached_text
from batchinfer.pipeline.workers.feed import Batches, run_plan
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.pipeline.workers.worker_specs import worker_specs
from batchinfer.plan.forecast.run import longest_step_s
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import read_requests
from batchinfer.plan.setup.checks import kv_memory_warnings
from batchinfer.plan.setup.setting import Setting
from batchinfer.report.tables.meter import Meter
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.index.row_names import try_name_rows
from batchinfer.store.results.error_summary import summarise_errors


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of a run for its engines.

    Attributes:
        setting: Device, arithmetic, memory and parallelism of the engines.
        longest: Maximum number of tokens of a sequence.
        logprobs: Largest number of log-probabilities per token that a row requests. None: no row requests any.
        requests: Number of requests that are planned when the engines start.
        index_parts: Returns the Parquet files of the index with the rows that are planned.
    """

    setting: Setting
    longest: int
    logprobs: int | None
    requests: int
    index_parts: Callable[[], Sequence[Path]]


def answer(
    run: OpenRun,
    planned: PlannedRun,
    index: Index,
    store: CompletionStore,
    add_drafts: AddDrafts,
    failed: int,
) -> None:
    """Start the engines, run all requests of a plan and their further attempts, and commit all answers to the store.

    After a signal, running requests may finish.

    Args:
        run: The run, with its job, options, state folder and report.
        planned: The plan and its forecasts.
        index: The index of all rows.
        store: The store of answers.
        add_drafts: Adds draft tokens to requests.
        failed: Number of rows that were errors before the engines ran.

    Raises:
        Interrupted: A signal came.
        StopTimeReached: The stop time came.
        BatchInferError: The engines failed.
    """
    plan = planned.plan
    setting = run.setup.setting.for_rows(plan.to_run)
    needs = Needs(setting, plan.longest, index.kept_logprobs, plan.to_run, lambda: index.index_parts)
    meter = open_meter(run, setting)
    if index.error_rows:
        run.progress.failed(dict(summarise_errors(index.index_parts).codes))
    budget = error_budget(run, index.rows).starting_at(failed)
    receiver = run.setup.output.receiver(run.setup.columns, run.setup.tokenizer)
    collector = Collector(store, meter, run.progress, receiver, planned.deadline, budget, planned.revised)
    with engines(run, needs) as pool:
        sources = [FurtherAttempts(run, index, collector, pool)]
        with RunPlans(run, store, collector, pool, sources) as plans:
            try:
                known = last_answers(run, plan.expected_tokens)
                wait_until_ready(run, pool)
                pool.learn(known)
                _begin(run, plan, pool)
                batches = read_requests(plan, index.tokens, REQUEST_BATCH, run.setup.roots)
                feed(run, add_drafts(batches), pool, collector, plans)
            finally:
                store.commit()
                facts = planned.revised.facts | ({} if planned.deadline is None else planned.deadline.facts)
                record_engine_work(run, pool, collector, facts)
    raise_pending(run, store, plan.rows_to_run, planned.forecast_s)


def raise_pending(
    run: OpenRun, store: CompletionStore, rows: int | None = None, forecast_s: float | None = None
) -> None:
    """Raise Interrupted if a signal came, or StopTimeReached if the stop time came. Otherwise do nothing.

    Args:
        run: The run, with its job, options, state folder and report.
        store: The store of answers. The message says how many answers are stored.
        rows: Number of rows without an answer before the engines ran. None if unknown.
        forecast_s: Forecast engine time for these rows in seconds, or None.
    """
    stop, count = run.options.stop_at, len(store)
    if stop is not None and run.interrupts.is_stop_pending:
        left = rows_left_text(run.progress, rows, forecast_s)
        stored = f"{counted(count, 'answer')} {'is' if count == 1 else 'are'} stored"
        raise StopTimeReached(
            f"{stop_reached_text(stop)}: {left}; {stored}. {continue_text(run.job, run.options)}"
        )
    run.interrupts.raise_pending(
        f"interrupted; {count} answers are stored and the same command continues from there"
    )


def open_meter(run: OpenRun, setting: Setting) -> Meter:
    """Create the meter that records samples of the engines' steps and requests for the report.

    Args:
        run: The run, with its job, options, state folder and report.
        setting: Device, arithmetic, memory and parallelism of the engines.
    """
    return run.report.open_meter(setting, setting.model_cost(run.setup.checkpoint))


@contextmanager
def engines(run: OpenRun, needs: Needs) -> Iterator[ReplicaPool]:
    """Start the engines of a run, and end them after the block. Yields the engines.

    Within the block, the first signal does not raise, but is recorded in `run.interrupts.pending`.

    Args:
        run: The run, with its job, options, state folder and report.
        needs: The requirements of the run for its engines.
    """
    for line in (*run.setup.checkpoint.notices, *kv_memory_warnings(run.job, run.setup.models)):
        run.notice(line)
    run.progress.phase("loading model")
    run.operators.mark_needed()
    with (
        run.interrupts.deferred(),
        run.report.timed("close_s"),
        _closing(run, _start_engines(run, needs)) as pool,
    ):
        yield pool


def feed(run: OpenRun, batches: Batches, pool: ReplicaPool, collector: Collector, plans: RunPlans) -> None:
    """Run the requests of the first plan and of later plans on the engines, until all are answered.

    Args:
        run: The run, with its job, options, state folder and report.
        batches: Batches of the first plan's requests.
        pool: The engines.
        collector: Receives the answers.
        plans: Makes later plans.
    """
    with run.report.timed("engine_s"):
        run_plan(batches, pool, collector, run.interrupts, partial(notify_stopping, run), plans)
    progress = run.progress
    answered = progress.knows_all_rows and progress.rows_left == 0 and not collector.rows_in_flight
    if answered or collector.should_stop():
        run.interrupts.ignore_stop()  # only publishing is left


@contextmanager
def _closing(run: OpenRun, pool: ReplicaPool) -> Iterator[ReplicaPool]:
    # Processes that are already exiting are waited for only at the end of the run
    run.at_end.callback(_close, run, pool)
    try:
        yield pool
    except BaseException:
        pool.close()
        raise
    if not pool.left:
        pool.close()


def _close(run: OpenRun, pool: ReplicaPool) -> None:
    with run.interrupts.deferred():  # the outcome is already known, so a signal must not change it
        pool.close()


def _start_engines(run: OpenRun, needs: Needs) -> ReplicaPool:
    def name_rows(keys: Sequence[bytes]) -> str:
        spill, attempts = run.state.staging / "names", run.job.attempts
        return try_name_rows(needs.index_parts(), keys, spill, attempts)

    specs = worker_specs(run.job, needs.setting, run.options.engine)
    setting = run.setup.setting
    step_s = partial(longest_step_s, setting, setting.model_cost(run.setup.checkpoint), needs.longest)
    return ReplicaPool(
        specs,
        needs.setting.engine_config(run.job, needs.longest, needs.logprobs),
        needs.requests,
        run.interrupts,
        name_rows=name_rows,
        notice=run.notice,
        death_log=DeathLog(run.state.engine_errors, run.state.ops),
        loading=partial(run.report.timed, "load_s"),
        longest_step_s=step_s,
        transport=run.options.transport,
        early=run.launch.workers_for(specs),
    )


def wait_until_ready(run: OpenRun, pool: ReplicaPool) -> None:
    """Wait until all engines have loaded, or until a signal comes.

    Args:
        run: The run. Its progress display is updated during the wait.
        pool: The engines.
    """
    while pool.info is None and run.interrupts.pending is None:
        pool.receive(0.1)
        run.progress.tick()
        run.operators.notify_progress()


def _begin(run: OpenRun, plan: Plan, pool: ReplicaPool) -> None:
    run.report.start_measuring(pool.infos)
    run.progress.running(
        rows=plan.rows_to_run,
        prompt_tokens=plan.prompt_tokens,
        expected_tokens=plan.expected_tokens,
    )


def notify_stopping(run: OpenRun, within_s: float) -> None:
    """Notify the user that the run stops early.

    Args:
        run: The run, with its job, options, state folder and report.
        within_s: Number of seconds that running rows have to finish.
    """
    run.progress.stopping()
    stop = run.options.stop_at if run.interrupts.is_stop_pending else None
    why, again = ("", "again ") if stop is None else (f" at {stop.at.astimezone():%H:%M} (--stop-at)", "")
    run.notice(
        f"stopping{why}: rows being computed have up to {within_s:.0f} s to finish; press Ctrl-C {again}to stop at "
        "once"
    )


def record_engine_work(
    run: OpenRun, pool: ReplicaPool, collector: Collector, facts: Mapping[str, Any]
) -> None:
    """Record in the report of a run what its engines did, and the tokens that duplicates saved.

    Args:
        run: The run, with its job, options, state folder and report.
        pool: The engines.
        collector: Counts the tokens that duplicates saved.
        facts: Further values, by column of the run table.
    """
    for one in pool.activities:
        run.report.record_activity(f"engine {one.engine}", one.activity, one.began, one.ended, *one.on)
    run.report.record_engines(pool.infos, pool.peak_rss, pool.other_cores, pool.expert_tokens, pool.ranks)
    run.report.note(
        worker_restarts=pool.restarts,
        duplicate_saved_tokens=collector.saved_tokens,
        duplicate_saved_output_tokens=collector.saved_output_tokens,
        **facts,
        **run.operators.facts,
    )
