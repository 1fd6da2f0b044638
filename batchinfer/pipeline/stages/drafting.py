"""Prepares drafts for requests: earlier answers, or answers of a draft model that runs before the job's model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from batchinfer.core.hub import short_name
from batchinfer.core.request import Request
from batchinfer.core.wording import counted
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.pipeline.open_run import OpenRun
from batchinfer.pipeline.plans.earlier_drafts import (
    AddDrafts,
    Batches,
    EarlierDrafts,
    with_draft,
    without_drafts,
)
from batchinfer.pipeline.stages.answering import (
    Needs,
    engines,
    notify_stopping,
    raise_pending,
    wait_until_ready,
)
from batchinfer.pipeline.workers.feed import run_plan
from batchinfer.pipeline.workers.launch import Launch
from batchinfer.pipeline.workers.messages import WorkDone
from batchinfer.plan.forecast.run import forecast_run
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.plan.order.requests import read_requests
from batchinfer.plan.setup.drafts import DraftModel
from batchinfer.plan.setup.job_setup import work_context
from batchinfer.report.progress import Progress
from batchinfer.report.stopwatch import OTHER
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index
from batchinfer.store.outputs.kind import Receiver
from batchinfer.store.results.reuse.draft_answers import (
    DraftRequests,
    write_draft_answers,
    write_draft_keys,
    write_lacking,
)
from batchinfer.store.results.reuse.given_answers import GivenAnswers


def prepare_drafts(run: OpenRun, plan: Plan, index: Index, store: CompletionStore) -> AddDrafts:
    """Return a function that adds draft tokens to the requests of a plan.

    If the job has a draft model that answers all rows first, it runs now, and its answers are the drafts. Otherwise the
    drafts are the answers of the job's last result, if any.

    Args:
        run: The run, with its job, options, state folder and report.
        plan: The plan.
        index: The index of all rows.
        store: The store of answers, which also stores the answers of the draft model.

    Raises:
        Interrupted: A signal came.
        BatchInferError: The engines of the draft model failed.
    """
    model = run.setup.first_draft_model
    if model is None:
        drafts = EarlierDrafts.of(run)
        return without_drafts if drafts is None else drafts.of_plan(plan, index.index_parts)
    began = time.monotonic()
    answers = _Drafting(run, model, plan, index, store).answers()
    run.report.note(draft_model_s=time.monotonic() - began, draft_model_runs="first")
    return partial(_add_drafts, GivenAnswers(answers), run.setup.checkpoint.spec.vocab)


def _add_drafts(answers: GivenAnswers, vocab: int, batches: Batches) -> Batches:
    for batch, requests in batches:
        found = zip(requests, answers.of(batch.numbers("seq")), strict=True)
        yield (
            batch,
            [with_draft(request, None if one is None else one["tokens"], vocab) for request, one in found],
        )


class _Drafting:
    """Runs a draft model over the requests of a plan. Its engines end before the job's engines start."""

    def __init__(
        self, run: OpenRun, model: DraftModel, plan: Plan, index: Index, store: CompletionStore
    ) -> None:
        self._whole, self._plan, self._store, self._index = run, plan, store, index
        self._spill = run.state.staging / "drafts"
        setup = run.setup.drafting
        assert setup is not None, "a draft model has a setup"
        setup = replace(setup, setting=setup.setting.for_rows(plan.to_run))
        self._run = replace(run, job=model.job, setup=setup, launch=Launch(run.options.transport))
        context = work_context(setup, run.state, remember=True)
        longest = model.setting.numerics.max_model_len
        self._requests = DraftRequests(context, longest, model.checkpoint.spec.vocab)

    def answers(self) -> Path:
        ops = self._run.state.ops
        batches = ((batch.numbers("seq").tolist(), requests) for batch, requests in self._planned())
        keys = write_draft_keys(self._plan.path, batches, self._requests, ops)
        lacking, count = write_lacking(keys, self._store.parts(), self._spill, ops)
        if count:
            self._answer(lacking, count)
        return write_draft_answers(keys, self._store.parts(), self._spill, ops)

    def _planned(self) -> Batches:
        return read_requests(self._plan, self._index.tokens, REQUEST_BATCH, self._whole.setup.roots)

    def _answer(self, lacking: Path, count: int) -> None:
        # `lacking` is a file with the positions of the requests in the plan
        run, plan = self._run, self._plan
        name = short_name(run.job.model.path)
        run.notice(f"drafts: {name} answers {counted(count, 'request')} first")
        share = count / plan.to_run
        if share == 1:
            for line in forecast_run(run.job, run.setup, plan, self._index.tokens, whole=False).lines:
                run.notice(f"drafts: {line}")
        longest = min(plan.longest, run.setup.setting.numerics.max_model_len)
        index_parts = self._index.index_parts
        needs = Needs(run.setup.setting, longest, None, count, lambda: index_parts)
        receiver = run.setup.output.receiver(None, run.setup.tokenizer)
        sink = _Sink(self._store, run.progress, receiver)
        with engines(run, needs) as pool:
            try:
                wait_until_ready(run, pool)
                run.progress.running(
                    rows=count,
                    prompt_tokens=round(share * plan.prompt_tokens),
                    expected_tokens=round(share * plan.expected_tokens),
                )
                with run.report.timed(OTHER):
                    run_plan(
                        self._lacking(lacking), pool, sink, run.interrupts, partial(notify_stopping, run)
                    )
            finally:
                self._store.commit()
                pool.close()  # frees the memory for the job's model
        run.progress.close()
        raise_pending(run, self._store, plan.rows_to_run, None)

    def _lacking(self, lacking: Path) -> Batches:
        # `shares_next` is 0 if the next request of the plan is left out
        wanted = GivenAnswers(lacking)
        for batch, requests in self._planned():
            is_wanted = [one is not None for one in wanted.of(batch.numbers("seq"))]
            found = []
            for at, request in enumerate(requests):
                one = self._requests.of(request) if is_wanted[at] else None
                if one is not None:
                    found.append(one if all(is_wanted[at : at + 2]) else replace(one, shares_next=0))
            yield batch, found


class _Sink:
    """Receives the answers of a draft model and stores them."""

    def __init__(self, store: CompletionStore, progress: Progress, receiver: Receiver) -> None:
        self._store, self._progress, self._receiver = store, progress, receiver
        self._expected: dict[bytes, int] = {}

    def register(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        self._receiver.expect(requests)
        self._expected |= {request.key: request.params.max_tokens for request in requests}

    def take(self, done: WorkDone) -> None:
        self._store.append(self._receiver.receive(done.completions))
        for step in done.steps:
            self._progress.step(step, done.engine)
        for one in done.completions:
            tokens = len(one.tokens.token_ids)
            self._progress.finished(
                expected_tokens=self._expected.pop(one.key), completion_tokens=tokens, engine=done.engine
            )
        self._store.maybe_commit()

    def should_stop(self) -> bool:
        """Return False, because errors of a draft model do not count as errors of the job."""
        return False

    def tick(self) -> None:
        self._store.maybe_commit()
        self._progress.tick()
