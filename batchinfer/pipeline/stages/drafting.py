"""The drafts of a plan's requests: earlier answers, or those of a smaller model, which answers all of them first."""

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
from batchinfer.pipeline.plans.earlier_drafts import Batches, EarlierDrafts, Given, drafted, without_drafts
from batchinfer.pipeline.stages.answering import (
    Needs,
    engines,
    raise_pending,
    tell_draining,
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


def drafts_of(run: OpenRun, plan: Plan, index: Index, store: CompletionStore) -> Given:
    """Return what gives the requests of a plan their drafts. A draft model answers them now. Raises Interrupted after a
    signal, and what ended the engines."""
    model = run.setup.drafts
    if model is None:
        drafts = EarlierDrafts.of(run)
        return without_drafts if drafts is None else drafts.of_plan(plan, index.index_parts)
    began = time.monotonic()
    answers = _Drafting(run, model, plan, index, store).answers()
    run.report.note(draft_model_s=time.monotonic() - began, draft_model_runs="first")
    return partial(_given, GivenAnswers(answers), run.setup.checkpoint.spec.vocab)


def _given(answers: GivenAnswers, vocab: int, batches: Batches) -> Batches:
    """Give the requests of a plan the tokens that a draft model answered."""
    for batch, requests in batches:
        found = zip(requests, answers.of(batch.numbers("seq")), strict=True)
        yield (
            batch,
            [drafted(request, None if one is None else one["tokens"], vocab) for request, one in found],
        )


class _Drafting:
    """One run of a draft model over a plan: the job's engines start only when its own have ended."""

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
        """Have the store hold the model's answers; return the file that has those of the plan."""
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
        """Have the model answer what is lacking."""
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
                    run_plan(self._asked(lacking), pool, sink, run.interrupts, partial(tell_draining, run))
            finally:
                self._store.commit()
                pool.close()  # its memory is the job's model's
        run.progress.close()
        raise_pending(run, self._store, plan.rows_to_run, None)

    def _asked(self, lacking: Path) -> Batches:
        """Yield what the model is asked. A request whose next one it is not asked shares nothing with that."""
        wanted = GivenAnswers(lacking)
        for batch, requests in self._planned():
            is_asked = [one is not None for one in wanted.of(batch.numbers("seq"))]
            asked = []
            for at, request in enumerate(requests):
                one = self._requests.of(request) if is_asked[at] else None
                if one is not None:
                    asked.append(one if all(is_asked[at : at + 2]) else replace(one, shares_next=0))
            yield batch, asked


class _Sink:
    """Stores what a draft model answers."""

    def __init__(self, store: CompletionStore, progress: Progress, receiver: Receiver) -> None:
        self._store, self._progress, self._receiver = store, progress, receiver
        self._expected: dict[bytes, int] = {}

    def planned(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Expect the answers of these requests."""
        self._receiver.expect(requests)
        self._expected |= {request.key: request.params.max_tokens for request in requests}

    def take(self, done: WorkDone) -> None:
        """Store the answers, and show how far the model is."""
        self._store.append(self._receiver.receive(done.completions))
        for step in done.steps:
            self._progress.step(step, done.engine)
        for one in done.completions:
            tokens = len(one.tokens.token_ids)
            self._progress.finished(
                expected_tokens=self._expected.pop(one.key), completion_tokens=tokens, engine=done.engine
            )
        self._store.maybe_commit()

    def enough(self) -> bool:
        """Never stop early: an answer that is missing is no error."""
        return False

    def tick(self) -> None:
        """Commit and show progress, where these are due."""
        self._store.maybe_commit()
        self._progress.tick()
