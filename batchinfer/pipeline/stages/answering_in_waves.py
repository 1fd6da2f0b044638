"""The answering stage in waves: runs rows while the rest of the input is read."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from batchinfer.core.sampling import MAX_LOGPROBS
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.background_reading import BackgroundReading
from batchinfer.pipeline.plans.earlier_drafts import last_answers
from batchinfer.pipeline.plans.further_attempts import FurtherAttempts
from batchinfer.pipeline.plans.run_plans import Replanned, RunPlans
from batchinfer.pipeline.plans.snapshot import Snapshot
from batchinfer.pipeline.plans.waves import Waves
from batchinfer.pipeline.stages.answering import (
    Needs,
    engines,
    feed,
    open_meter,
    raise_pending,
    record_engine_work,
)
from batchinfer.pipeline.stages.calibrating import check_quality
from batchinfer.pipeline.stages.planning import notify_plan, revised_forecast
from batchinfer.pipeline.stages.reading import UnreadInput, complete
from batchinfer.pipeline.stages.verdict import error_budget, refuse_stored_errors
from batchinfer.pipeline.workers.feed import Batches
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.forecast.deadline import Deadline, DeadlineWatch
from batchinfer.plan.forecast.run import RevisedForecast, RunForecast
from batchinfer.plan.forecast.text import plan_line
from batchinfer.plan.order.plan import Plan
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.results.error_summary import summarise_errors
from batchinfer.store.results.planned_work import announce_plans
from batchinfer.store.results.reuse.shared_answers import saved_tokens


def answer_in_waves(run: OpenRun, unread: UnreadInput, store: CompletionStore) -> Index:
    """Read the rest of the input while engines run the rows that were read. All answers are committed to the store.

    After a signal, running requests may finish.

    Args:
        run: The run, with its job, options, state folder and report.
        unread: The part of the input that was not read yet.
        store: The store of answers.

    Returns:
        The index of all rows.

    Raises:
        Interrupted: A signal came.
        StopTimeReached: The stop time came.
        QualityTooLow: Quantisation changes the predictions beyond the job's limits.
        BatchInferError: The engines failed, the input cannot be read, or it has too few rows or too many error rows.
    """
    check_quality(run)
    before = set(store.parts())
    with (
        BackgroundReading(unread.ingestion, unread.steps, unread.at) as reading,
        announce_plans(store.path, (), run.state.ops) as announcement,
    ):
        answering = _Answering(run, store)
        waves = answering.waves = Waves(run, reading, announcement, answering.handle_switch)
        answering.run_all()
    raise_pending(run, store)
    index = waves.index
    assert index is not None, "engines follow plans until one has all rows"
    new = [part for part in store.parts() if part not in before]
    saved = saved_tokens(index.index_parts, new, run.state.staging / "shared")
    run.report.note(duplicate_saved_tokens=saved[0], duplicate_saved_output_tokens=saved[1])
    return index


class _Answering:
    waves: Waves
    _pool: ReplicaPool
    _plans: RunPlans

    def __init__(self, run: OpenRun, store: CompletionStore) -> None:
        self._run, self._store, self._stored = run, store, store.parts()
        receiver = run.setup.output.receiver(run.setup.columns, run.setup.tokenizer)
        deadline = Deadline.of(run.job, run.now, None)
        self._deadline = None if deadline is None else DeadlineWatch(deadline, run.notice)
        meter = open_meter(run, run.setup.setting)
        self._collector = Collector(store, meter, run.progress, receiver, self._deadline)
        self._revised: RevisedForecast | None = None  # set when all rows are known
        self._began: float | None = None  # when engines started to run rows
        self._known: _Known | None = None  # the current plan
        self._shown = False  # whether the display has switched to rows and tokens
        self._counted_parts = 0  # parts of the index whose error rows are counted
        self._facts: dict[str, Any] = {"waves": 0, "again_tokens": 0}

    def run_all(self) -> None:
        run = self._run
        longest, logprobs = run.setup.setting.numerics.max_model_len, _most_logprobs(run)
        needs = Needs(run.setup.setting, longest, logprobs, 0, lambda: self.waves.parts)
        with (
            engines(run, needs) as pool,
            RunPlans(run, self._store, self._collector, pool, [self.waves]) as plans,
        ):
            self._pool, self._plans = pool, plans
            try:
                first = self._wait_until_ready()
                feed(run, first, pool, self._collector, plans)
            finally:
                self._store.commit()
                deadline = {} if self._deadline is None else self._deadline.facts
                revised = {} if self._revised is None else self._revised.facts
                record_engine_work(run, pool, self._collector, self._facts | deadline | revised)

    def _wait_until_ready(self) -> Batches:
        run, pool, found = self._run, self._pool, None
        known = last_answers(run)
        while pool.info is None and run.interrupts.pending is None:
            pool.receive(0.1)
            run.progress.tick()
            run.operators.notify_progress()
            found = self._plans.next(found is None, found is None) or found
        pool.learn(known)
        run.report.start_measuring(pool.infos)
        self._began = time.monotonic()
        if found is None:
            run.progress.phase("planning")
        self._show()
        return iter(()) if found is None else found

    def handle_switch(self, found: Replanned, known: Snapshot, index: Index | None) -> None:
        """Update the progress display and the report when engines switch to another plan.

        Args:
            found: The plan.
            known: The requests that engines had received when the plan was made.
            index: The index if the plan has all rows of the input, else None.

        Raises:
            BatchInferError: See `complete`.
        """
        plan = found.plan
        self._known = _Known(plan, known, index is None)
        self._facts["waves"] += 1
        if self._run.setup.setting.parts.shares_prefixes:
            self._facts["again_tokens"] += plan.again_tokens
        self._show()
        self._count_errors()
        if index is None:
            self._run.notice(f"{plan_line(self._known.own)}; the input is still being read")
        else:
            self._all_known(plan, index)

    def _show(self) -> None:
        if self._began is None or self._known is None:
            return
        if not self._shown:
            self._run.progress.running(rows=0, prompt_tokens=0, expected_tokens=0, more=True)
            self._shown = True
        plan, given = self._known.plan, self._known.given
        rows = plan.rows - plan.error_rows
        to_run = plan.rows_to_run - plan.rows_of(self._collector.submitted_since(given))
        self._run.progress.known(
            rows=rows,
            done=rows - to_run - self._collector.rows_in_flight,
            prompt_tokens=given.prompt_tokens + plan.prompt_tokens,
            expected_tokens=given.expected_tokens + plan.expected_tokens,
            more=self._known.more,
        )

    def _count_errors(self) -> None:
        new = self.waves.parts[self._counted_parts :]
        self._counted_parts += len(new)
        self._run.progress.failed(dict(summarise_errors(new).codes))

    def _all_known(self, plan: Plan, index: Index) -> None:
        run, forecast, collector = self._run, self.waves.forecast, self._collector
        complete(run, index)
        assert self._known is not None
        run.report.record_plan(self._known.own, None)
        notify_plan(run, self._known.own, forecast)
        self._note_forecast(forecast)
        failed = refuse_stored_errors(run, index, self._stored)
        budget = error_budget(run, index.rows).starting_at(failed)
        self._revised = revised_forecast(run, forecast, self._began)
        collector.set_budget(budget, self._revised)
        collector.stop_recording_keys()
        self._plans.add(FurtherAttempts(run, index, collector, self._pool))

    def _note_forecast(self, forecast: RunForecast) -> None:
        # The forecast of the whole engine time is the time so far plus the forecast of the rest
        found, run = forecast.engine, self._run
        if found is not None and found.seconds is not None:
            passed_s = 0.0 if self._began is None else time.monotonic() - self._began
            self._facts |= {
                "forecast_s": passed_s + found.seconds,
                "forecast_basis": found.times.basis,
                "forecast_answers_from": found.answers_from,
            }
        deadline = Deadline.of(run.job, run.now, found)
        if deadline is not None and self._deadline is not None:
            run.notice(f"deadline: {deadline.text}")
            self._deadline.forecast(deadline)


@dataclass(frozen=True, slots=True)
class _Known:
    """The plan whose requests engines receive now.

    Attributes:
        plan: The plan.
        given: The requests that engines had received when the plan was made.
        more: Whether rows of the input are still to be read.
    """

    plan: Plan
    given: Snapshot
    more: bool

    @property
    def own(self) -> Plan:
        """Return a copy of the plan in which `present` counts only answers of earlier runs."""
        return replace(self.plan, present=self.plan.present - self.given.requests)


def _most_logprobs(run: OpenRun) -> int | None:
    sampling = run.job.sampling
    if run.job.requests or "logprobs" in dict(sampling.from_columns):
        return MAX_LOGPROBS
    return 0 if run.job.output.confidence else run.job.params().logprobs
