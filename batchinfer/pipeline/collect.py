"""The collector of a run's answers: it hands them to the store, the meter and the progress display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from batchinfer.core.request import Completion, Request
from batchinfer.pipeline.plans.snapshot import HandedOut, Snapshot
from batchinfer.pipeline.workers.messages import WorkDone
from batchinfer.plan.forecast.deadline import DeadlineWatch
from batchinfer.plan.forecast.run import RevisedForecast
from batchinfer.plan.order.plan import PlanBatch
from batchinfer.report.progress import Progress
from batchinfer.report.tables.meter import Meter
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.validity import is_invalid
from batchinfer.store.outputs.kind import Receiver
from batchinfer.store.results.error_budget import Budget


class _Expected(NamedTuple):
    """An entry keeps what is known of a request in flight."""

    tokens: int  # of its answer, at most
    prompt_tokens: int
    users: int  # rows that its answer serves
    final_users: int  # of these, those that it serves whether it is valid or not


class Collector:
    """The sink of `run_plan`."""

    def __init__(
        self,
        store: CompletionStore,
        meter: Meter,
        progress: Progress,
        receiver: Receiver,
        deadline: DeadlineWatch | None = None,
        budget: Budget | None = None,
        revised: RevisedForecast | None = None,
    ) -> None:
        """budget: None: how many rows there are is not known yet. So with `revised`, which looks at what is done of
        them."""
        self._deadline, self._revised = deadline, revised
        self._store, self._meter, self._progress, self._budget = store, meter, progress, budget
        self._in_flight: dict[bytes, _Expected] = {}
        self._handed_out = HandedOut(keys=[] if budget is None else None)
        self._receiver = receiver
        self._errors = 0  # of requests that engines have answered
        self.invalid = 0  # answers since the last plan
        self.saved_tokens = self.saved_output_tokens = 0  # not run, not sampled: the rows were duplicates

    def planned(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Expect the answers of these requests, which go to the engine now."""
        self._meter.planned(requests)
        self._receiver.expect(requests)
        names = ("expected_tokens", "token_count", "users", "final_users")
        columns = [batch.numbers(name).tolist() for name in names]
        self._handed_out.add(batch.keys, columns[1], columns[0])
        for key, *known in zip(batch.keys, *columns, strict=True):
            self._in_flight[key] = _Expected(*known)

    def snapshot(self, parts: Sequence[Path]) -> Snapshot:
        """Return what is known now, where the store has these parts: what is planned now is planned without it."""
        self.invalid, given = 0, self._handed_out
        return Snapshot(
            parts,
            [*self._in_flight],
            [*(given.keys or ())],
            given.requests,
            given.prompt_tokens,
            given.expected_tokens,
        )

    @property
    def rows_in_flight(self) -> int:
        """Return how many rows wait for the answer of a request that engines have."""
        return sum(known.users for known in self._in_flight.values())

    def given_since(self, known: Snapshot) -> frozenset[bytes]:
        """Return the keys that engines were given since then. While the input is read, a plan takes the place of
        another that has more; later there is nothing else to give."""
        if self._handed_out.keys is None:
            assert self._handed_out.requests == known.requests, "requests of an older plan were given"
            return frozenset()
        return frozenset(self._handed_out.keys[known.requests :])

    def all_known(self, budget: Budget, revised: RevisedForecast) -> None:
        """Take note that the input was read to its end, so that the number of rows is known."""
        self._budget, self._revised = budget, revised

    def plans_no_rows(self) -> None:
        """Forget which requests were given: what is planned from now on follows from answers."""
        self._handed_out.keys = None

    def take(self, done: WorkDone) -> None:
        """Store the answers, count the rest."""
        completions = self._receiver.receive(done.completions)
        self._store.append(completions)
        for step in done.steps:
            self._meter.step(step, done.engine, done.replica)
            self._progress.step(step, done.engine)
        for request in done.requests:
            rows = self._in_flight[request.key].users
            self._meter.request(request, rows, done.engine, done.replica)
        cut = {request.key for request in done.requests if request.cut}
        for given, completion in zip(done.completions, completions, strict=True):
            tokens = len(given.tokens.token_ids)
            self._count(completion, tokens, completion.key in cut, done.engine)
        self._store.maybe_commit()

    def enough(self) -> bool:
        """Whether going on is pointless: too many rows are errors, and the job publishes no such result."""
        budget = self._budget
        return budget is not None and not budget.publish and budget.exceeded(budget.already + self._errors)

    def tick(self) -> None:
        """Commit, show progress and look at the deadline, where these are due."""
        self._store.maybe_commit()
        self._progress.tick()
        if self._deadline is not None:
            self._deadline.look(self._progress.left_s())
        if self._revised is not None:
            self._revised.look(self._progress)

    def _count(self, completion: Completion, tokens: int, cut: bool, engine: int) -> None:
        known, invalid = self._in_flight.pop(completion.key), is_invalid(completion)
        self.invalid += invalid
        served = known.final_users if invalid else known.users  # the others run again
        if completion.error is not None:
            self._errors += served
        else:
            others = max(0, known.users - 1)  # the prompt of classify.calibrate serves no row
            self.saved_tokens += others * known.prompt_tokens
            self.saved_output_tokens += others * tokens
            if self._deadline is not None:
                self._deadline.answered(served, tokens)
        self._progress.finished(
            expected_tokens=known.tokens,
            completion_tokens=tokens,
            rows=served,
            error=None if completion.error is None else completion.error.code,
            cut=cut,
            engine=engine,
        )
