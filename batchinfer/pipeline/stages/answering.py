"""The engines' stage: they are started and fed with the plan, and their answers are collected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from batchinfer.data.index.index import Index
from batchinfer.data.index.row_names import named_if_found
from batchinfer.data.results.error_summary import summarise_errors
from batchinfer.data.store.completion_store import CompletionStore
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.further_attempts import FurtherAttempts
from batchinfer.pipeline.stages.open_run import OpenRun
from batchinfer.pipeline.stages.planning import PlannedRun
from batchinfer.pipeline.stages.verdict import error_budget
from batchinfer.pipeline.workers.feed import run_plan
from batchinfer.pipeline.workers.places import worker_specs
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.forecast.longest_step import longest_step_s
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import planned_requests
from batchinfer.plan.setup.resolve import Setting
from batchinfer.report.tables.meter import Meter


def answer(run: OpenRun, planned: PlannedRun, index: Index, store: CompletionStore) -> None:
    """Run the plan. After a signal, what runs may finish, and all that is finished is committed.

    Raises Interrupted after a signal, and what ended the engines.
    """
    plan = planned.plan
    setting = run.setup.setting.for_rows(plan.to_run)
    meter = run.report.open_meter(setting, setting.model_cost(run.setup.checkpoint))
    if index.error_rows:
        run.progress.failed(dict(summarise_errors(index.index_parts).codes))
    collector = _collector(run, planned, index, store, meter)
    for line in run.setup.checkpoint.notices:
        run.notice(line)
    run.progress.phase("loading model")
    run.operators.needed()
    with (
        run.interrupts.deferred(),
        run.report.timed("close_s"),
        _ended(run, _engines(run, setting, plan, index)) as pool,
    ):
        try:
            _wait_until_ready(run, pool)
            _begin(run, plan, pool)
            with run.report.timed("engine_s"):
                batches = planned_requests(plan, index.tokens, REQUEST_BATCH, run.setup.roots)
                further = FurtherAttempts(run, index, store, collector, pool)
                run_plan(batches, pool, collector, run.interrupts, partial(_tell_draining, run), further)
        finally:
            store.commit()
            _note_figures(run, planned, pool, collector)
    run.interrupts.raise_pending(
        f"interrupted; {len(store)} answers are stored and the same command continues from there"
    )


@contextmanager
def _ended(run: OpenRun, pool: ReplicaPool) -> Iterator[ReplicaPool]:
    """End the engines when the block is left. Those that have left by themselves end while the run goes on, which waits
    for their processes when it is over."""
    run.at_end.callback(_close, run, pool)
    try:
        yield pool
    except BaseException:
        pool.close()
        raise
    if not pool.left:
        pool.close()


def _close(run: OpenRun, pool: ReplicaPool) -> None:
    """End what is left of the engines. How the run ended is known by now: a signal changes nothing of it."""
    with run.interrupts.deferred():
        pool.close()


def _collector(
    run: OpenRun, planned: PlannedRun, index: Index, store: CompletionStore, meter: Meter
) -> Collector:
    budget = error_budget(run, index.rows).starting_at(index.error_rows)
    receiver = run.setup.output.receiver(run.setup.columns, run.setup.tokenizer)
    return Collector(store, meter, run.progress, budget, receiver, planned.deadline, planned.revised)


def _engines(run: OpenRun, setting: Setting, plan: Plan, index: Index) -> ReplicaPool:
    def named(keys: Sequence[bytes]) -> str:
        return named_if_found(index.index_parts, keys, run.state.staging / "names", index.attempts)

    specs = worker_specs(run.job, setting, run.options.engine)
    whole = run.setup.setting
    step_s = partial(longest_step_s, whole, whole.model_cost(run.setup.checkpoint), plan.longest)
    return ReplicaPool(
        specs,
        setting.engine_config(run.job, plan.longest, index.logprobs),
        plan.to_run,
        run.interrupts,
        name_rows=named,
        notice=run.notice,
        loading=partial(run.report.timed, "load_s"),
        longest_step_s=step_s,
        transport=run.options.transport,
        early=run.launch.started(specs),
    )


def _wait_until_ready(run: OpenRun, pool: ReplicaPool) -> None:
    while pool.info is None and run.interrupts.pending is None:
        pool.receive(0.1)
        run.progress.tick()
        run.operators.look()


def _begin(run: OpenRun, plan: Plan, pool: ReplicaPool) -> None:
    run.report.began(pool.infos)
    run.progress.running(
        rows=plan.to_run + plan.duplicates,
        prompt_tokens=plan.prompt_tokens,
        expected_tokens=plan.expected_tokens,
    )


def _tell_draining(run: OpenRun, within_s: float) -> None:
    run.notice(
        f"stopping: rows being computed have up to {within_s:.0f} s to finish; press Ctrl-C again to stop at once"
    )


def _note_figures(run: OpenRun, planned: PlannedRun, pool: ReplicaPool, collector: Collector) -> None:
    """Note for the run's report what the engines turned out to be, and what running the plan took and saved."""
    for engine, activity, began, ended in pool.activities:
        run.report.happened(f"engine {engine}", activity, began, ended)
    run.report.ran(pool.infos, pool.peak_rss, pool.other_cores, pool.expert_tokens)
    run.report.note(
        worker_restarts=pool.restarts,
        duplicate_saved_tokens=collector.saved_tokens,
        duplicate_saved_output_tokens=collector.saved_output_tokens,
        **planned.revised.facts,
        **run.operators.facts,
        **({} if planned.deadline is None else planned.deadline.facts),
    )
