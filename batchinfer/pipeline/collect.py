"""Passes the answers of a run to the store, the meter and the progress display."""

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
    """A request that an engine has received and not answered yet.

    Attributes:
        tokens: Maximum number of tokens of the answer.
        prompt_tokens: Number of tokens of the prompt.
        users: Number of rows that receive the answer.
        final_users: Number of rows that receive the answer even if it is invalid, because they have no further attempt.
    """

    tokens: int
    prompt_tokens: int
    users: int
    final_users: int


class Collector:
    """Receives the answers of engines, and passes them to the store, the meter and the progress display.

    It also counts error rows and invalid answers, and records which requests engines have received and answered.
    """

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
        """Connect the objects that answers are passed to.

        Args:
            store: Stores the answers.
            meter: Records the samples of steps and requests.
            progress: The progress display.
            receiver: Converts answers to the form in which they are stored.
            deadline: Watches the job's deadline. None if the job has none.
            budget: The error budget. None while the number of rows is unknown.
            revised: Revises the forecast from the first answers. None while the number of rows is unknown.
        """
        self._deadline, self._revised = deadline, revised
        self._store, self._meter, self._progress, self._budget = store, meter, progress, budget
        self._in_flight: dict[bytes, _Expected] = {}
        self._handed_out = HandedOut(keys=[] if budget is None else None)
        self._receiver = receiver
        self._errors = 0  # error rows among the answers of engines
        self.invalid = 0  # invalid answers since the last plan
        self.saved_tokens = self.saved_output_tokens = 0  # tokens that duplicates did not compute

    def register(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Register requests that are about to be submitted to an engine.

        Args:
            batch: The rows of the plan for these requests.
            requests: The requests.
        """
        self._meter.record_order(requests)
        self._receiver.expect(requests)
        names = ("expected_tokens", "token_count", "users", "final_users")
        columns = [batch.numbers(name).tolist() for name in names]
        self._handed_out.add(batch.keys, columns[1], columns[0])
        for key, *values in zip(batch.keys, *columns, strict=True):
            self._in_flight[key] = _Expected(*values)

    def snapshot(self, parts: Sequence[Path]) -> Snapshot:
        """Return the requests that engines have received so far, so that the next plan can leave them out.

        The count of invalid answers is reset, because the next plan contains their further attempts.

        Args:
            parts: The Parquet files of the store now.
        """
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
        """Return the number of rows whose requests engines have received and not answered yet."""
        return sum(entry.users for entry in self._in_flight.values())

    def submitted_since(self, known: Snapshot) -> frozenset[bytes]:
        """Return the work keys of the requests that engines have received since a snapshot was taken.

        Args:
            known: The snapshot.
        """
        if self._handed_out.keys is None:
            # a plan for further attempts is only made when the plan before it is exhausted
            assert self._handed_out.requests == known.requests, "requests of an older plan were given"
            return frozenset()
        return frozenset(self._handed_out.keys[known.requests :])

    def set_budget(self, budget: Budget, revised: RevisedForecast) -> None:
        """Set the error budget and the object that revises the forecast. Called once the whole input has been read.

        Args:
            budget: The error budget.
            revised: Revises the forecast from the first answers.
        """
        self._budget, self._revised = budget, revised

    def stop_recording_keys(self) -> None:
        """Stop recording the work keys of submitted requests, because later plans do not need them."""
        self._handed_out.keys = None

    def take(self, done: WorkDone) -> None:
        """Store the answers of an engine, and count its steps, requests and rows.

        Args:
            done: The answers and samples from the engine.
        """
        completions = self._receiver.receive(done.completions)
        self._store.append(completions)
        for step in done.steps:
            self._meter.step(step, done.engine, done.replica)
            self._progress.step(step, done.engine)
        for request in done.requests:
            rows = self._in_flight[request.key].users
            self._meter.request(request, rows, done.engine, done.replica)
        truncated = {request.key for request in done.requests if request.cut}
        for given, completion in zip(done.completions, completions, strict=True):
            tokens = len(given.tokens.token_ids)
            self._count(completion, tokens, completion.key in truncated, done.engine)
        self._store.maybe_commit()

    def should_stop(self) -> bool:
        """Return True if there are too many error rows to publish a result."""
        budget = self._budget
        return budget is not None and not budget.publish and budget.exceeded(budget.already + self._errors)

    def tick(self) -> None:
        """Commit answers, update the progress display, and check the deadline and the forecast, each if it is due."""
        self._store.maybe_commit()
        self._progress.tick()
        if self._deadline is not None:
            self._deadline.warn_if_late(self._progress.left_s())
        if self._revised is not None:
            self._revised.report_once(self._progress)

    def _count(self, completion: Completion, tokens: int, truncated: bool, engine: int) -> None:
        expected, invalid = self._in_flight.pop(completion.key), is_invalid(completion)
        self.invalid += invalid
        served = expected.final_users if invalid else expected.users  # the other rows run again
        if completion.error is not None:
            self._errors += served
        else:
            others = max(0, expected.users - 1)  # the prompt of classify.calibrate belongs to no row
            self.saved_tokens += others * expected.prompt_tokens
            self.saved_output_tokens += others * tokens
            if self._deadline is not None:
                self._deadline.answered(served, tokens)
        self._progress.finished(
            expected_tokens=expected.tokens,
            completion_tokens=tokens,
            rows=served,
            error=None if completion.error is None else completion.error.code,
            truncated=truncated,
            engine=engine,
        )
