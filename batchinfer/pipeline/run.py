"""A job from its file to its published result: the rooms, in the order in which the data passes them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from batchinfer.core.errors import (
    ErrorBudgetExceeded,
    InputCorrupt,
    OutputConflict,
    StorageError,
    known,
)
from batchinfer.core.hub import short_name
from batchinfer.data.columns.answer_check import AnswerCheck
from batchinfer.data.index.index import Index
from batchinfer.data.index.ingest import INGEST_FORMAT, IngestOptions, IngestProgress, ingest
from batchinfer.data.index.row_names import named_if_found
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.job_input import input_files, open_input
from batchinfer.data.results.error_budget import Budget, budget_text
from batchinfer.data.results.error_summary import ErrorSummary, summarise_all_errors, summarise_errors
from batchinfer.data.results.join import ErrorCounts, count_errors
from batchinfer.data.results.made_by import MadeBy, note_made_by
from batchinfer.data.results.manifest import Manifest, PublishSpec, is_published
from batchinfer.data.results.openai import LINE_BYTES, asked, write_openai
from batchinfer.data.results.output_file import OutputFile
from batchinfer.data.results.partial import PARTIAL
from batchinfer.data.results.planned_work import OtherRun, alike, announced, wait_for
from batchinfer.data.results.published import intact, published, published_or_told
from batchinfer.data.results.published_inputs import identities, published_inputs, remember_inputs
from batchinfer.data.results.publisher import publish
from batchinfer.data.storage.durable import storage
from batchinfer.data.storage.remembered import read_strings, write_strings
from batchinfer.data.storage.state import StateFolder, state_of
from batchinfer.data.store.completion_store import CompletionStore
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.engine.config import NUMERICS_VERSION
from batchinfer.job import Job
from batchinfer.models.opening import StoredModel
from batchinfer.pipeline.clean import clean_after_run, note_use
from batchinfer.pipeline.collect import Collector
from batchinfer.pipeline.openai_file import openai_file
from batchinfer.pipeline.operators_build import OperatorsBuild, operators_built
from batchinfer.pipeline.options import ENGINE
from batchinfer.pipeline.options import RunOptions as RunOptions
from batchinfer.pipeline.progress_file import ProgressFile
from batchinfer.pipeline.report import Outcome, RunReport, told_by
from batchinfer.pipeline.workers.feed import run_plan
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.places import worker_specs
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.plan.forecast.deadline import Deadline, DeadlineWatch
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.forecast.longest_step import longest_step_s
from batchinfer.plan.forecast.revised_forecast import RevisedForecast
from batchinfer.plan.forecast.run import forecast_run
from batchinfer.plan.forecast.text import plan_line
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.setup.preflight import Setup, check_input, check_setup
from batchinfer.plan.setup.resolve import Setting
from batchinfer.report.progress import Progress
from batchinfer.report.stopwatch import Stopwatch
from batchinfer.report.tables.exit_status import ALREADY_PUBLISHED, PUBLISHED, over_budget
from batchinfer.report.tables.folder import writing


def run_job(
    job: Job, options: RunOptions, progress: Progress, interrupts: Interrupts, notice: Callable[[str], None]
) -> Outcome:
    """Run a job, or what is left of it. `notice` gets a line for what a user should know meanwhile.

    Raises the exception tree of errors.py; whatever was finished before is committed.
    """
    watch = Stopwatch(options.already_s)
    whole = state_of(job)
    if options.limit is not None:
        job = job.first_rows(options.limit)
    state = state_of(job)
    setup = check_setup(job, state, options.replace)
    out, timestamps = options.to_openai, options.openai_timestamps
    openai = openai_file(job, out, state, whole, timestamps=timestamps, replace=options.replace)
    with state.lock(), operators_built(setup.setting, notice, options.engine == ENGINE) as operators:
        run = _Run(job, options, setup, state, openai, progress, interrupts, notice, watch, operators)
        with writing(run.report.folder, state.report_lock), run.reported(), interrupts.retold():
            return run.outcome()


@dataclass(slots=True)
class _Run:
    """One run of one job, holding its lock."""

    job: Job
    options: RunOptions
    setup: Setup
    state: StateFolder
    openai: OutputFile | None
    progress: Progress
    interrupts: Interrupts
    notice: Callable[[str], None]
    watch: Stopwatch
    operators: OperatorsBuild
    report: RunReport = field(init=False)
    record: ProgressFile = field(init=False)
    message: str | None = None  # why the exit code is not 0
    now: datetime = field(init=False)  # one for the whole run: it may pass midnight
    deadline: DeadlineWatch | None = field(init=False, default=None)
    revised: RevisedForecast = field(init=False)

    def __post_init__(self) -> None:
        self.report = RunReport(self.job, self.setting, self.watch)
        options = self.options
        self.report.note(trial=options.limit is not None, price_per_hour=options.price_per_hour)
        self.now = datetime.now().astimezone()
        self.record = ProgressFile(self.state, self.report.identity, self.notice)

    @property
    def checkpoint(self) -> StoredModel:
        return self.setup.checkpoint

    @property
    def setting(self) -> Setting:
        return self.setup.setting

    @property
    def tokenizer(self) -> Tokenizer:
        return self.setup.tokenizer

    @contextmanager
    def reported(self) -> Iterator[None]:
        """However the run ends, its report is written. While it lasts, its progress is on record."""
        self.record.begin()
        self.progress.recorded_by(self.record)
        try:
            yield
        except BaseException as error:
            self.message = str(known(error))
            with self.interrupts.deferred(), told_by(self.notice):
                self.progress.record()  # what was done since it was last on record
                self.report.failed(error)
                try:
                    self.report.close()
                finally:
                    self._leave_word()
            raise
        finally:
            self.progress.recorded_by(None)
            self.progress.close()
        with self.interrupts.deferred():
            self.report.close()
            with told_by(self.notice):
                self._leave_word()

    def _leave_word(self) -> None:
        """How the run ended, where other programs look for it. Raises OSError, StorageError."""
        row = self.report.row
        self.record.ended(row["exit_code"], row["exit_status"])
        with self.state.exclusively():  # runs for other dates write it, too
            self.report.write_last(self.message, self.state.ops)

    def outcome(self) -> Outcome:
        """Read, plan, run, publish."""
        self.state.remember_store()
        self.state.remove_old_generations()
        self.state.remove_idle()
        if self.openai is not None:
            self.openai.probe()
        context = self._context()
        if (found := self._done(context)) is not None:
            return self._nothing_to_do(found)
        index = self._ingest(context)
        if self.openai is not None:
            self.openai.check_space(index.rows * LINE_BYTES)
        budget = self._budget(index.rows)
        self._refuse_hopeless(index, budget)
        with self._store() as store:
            plan = self._plan(index, store)
            with announced(store.path, plan.path, self.state.ops) as others:
                plan = self._plan_rest(plan, others if plan.to_run else [], index, store)
                if plan.to_run:
                    self._execute(plan, index, store, budget)
            with self.report.timed("publish_s"):
                store.refresh()  # runs for other dates, and trials, add to it meanwhile
                self._check_errors(index, store, budget)
                manifest, changed = self._publish(context, index, store)
        with self.interrupts.deferred(), self.report.timed("close_s"):
            self._tidy()  # it is published: neither its clearing up nor its report is cut short
        if self.openai is not None:
            self.interrupts.raise_pending(
                "interrupted; the results are published, and the same command writes the --to-openai file"
            )
        with self.report.timed("publish_s"):
            self._write_openai(index.inputs)
        with self.interrupts.deferred(), self.report.timed("close_s"):
            outcome = self._judged(manifest, PUBLISHED)
            return outcome if changed else self._unreported(outcome)

    def _store(self) -> CompletionStore:
        with self.report.timed("plan_s"):
            store = CompletionStore(
                self.state.completions,
                numerics=NUMERICS_VERSION,
                rows=self.job.commit.rows,
                seconds=self.job.commit.seconds,
                verify=self.options.verify,
                digests=True,
                ops=self.state.ops,
            )
        for lost in store.discarded:
            self.notice(f"{lost.path}: {lost.reason}; its rows run again")
        return store

    def _check_errors(self, index: Index, store: CompletionStore, budget: Budget) -> None:
        counts = count_errors(index.index_parts, store.parts(), self.state.staging / "count")
        if budget.exceeded(counts.errors) and not budget.publish:
            errors = summarise_all_errors(index.index_parts, store.parts(), self.state.staging / "count")
            raise self._over_budget(counts, budget, errors)

    def _over_budget(self, counts: ErrorCounts, budget: Budget, errors: ErrorSummary) -> ErrorBudgetExceeded:
        """The run's row says why, too."""
        self.report.note(rows_error=errors.rows, error_codes=dict(errors.codes))
        return ErrorBudgetExceeded(budget_text(counts, budget, errors))

    def _context(self) -> bytes:
        """The digest of all but the rows that decides an answer. Weight files are hashed once, then remembered."""
        digests = read_strings(self.state.fingerprints)
        before = dict(digests)
        context = self.setup.context(digests)
        if digests != before:
            with self.state.exclusively():
                write_strings(self.state.fingerprints, digests, self.state.ops)
        return context

    def _identity(self, context: bytes) -> str:
        day = self.now.date().isoformat() if self.tokenizer.tells_the_day else ""
        material = self.job.identity_json().encode() + context + f"{day} {INGEST_FORMAT}".encode()
        return hashlib.sha256(material).hexdigest()

    def _spec(self, context: bytes, inputs: list[dict[str, Any]]) -> PublishSpec:
        return PublishSpec(
            self.job.name,
            self._identity(context),
            tuple(inputs),
            NUMERICS_VERSION,
            self.job.output.rows_per_file,
        )

    def _done(self, context: bytes) -> Manifest | None:
        """The manifest of this very result, if it is published whole and no input file has changed since. SQL always
        runs again."""
        found = published_or_told(self.state.results, self.notice, fresh=self.options.verify)
        if found is None or self.job.input.sql or self.options.retry_errors or self._lost_answers():
            return None
        inputs = published_inputs(self.state.published, self._files())
        current = inputs is not None and is_published(self.state.results, self._spec(context, inputs))
        return found.manifest if current else None

    def _lost_answers(self) -> bool:
        """Whether `--verify` finds stored answers damaged."""
        if not self.options.verify or not self.state.completions.is_dir():
            return False
        with self._store() as store:
            return bool(store.discarded)

    def _budget(self, rows: int) -> Budget:
        return Budget(rows, self.job.on_error.max_error_rate, self.job.on_error.publish)

    def _files(self) -> list[InputFile]:
        return input_files(self.job)

    def _nothing_to_do(self, manifest: Manifest) -> Outcome:
        self._write_openai(self._files())
        with storage(self.state.published, "touch"):
            self.state.ops.touch(self.state.published)  # so long were its completions in use
        return self._unreported(self._judged(manifest, ALREADY_PUBLISHED))

    def _ingest(self, context: bytes) -> Index:
        self.operators.look()
        self.progress.phase("reading", self.job.input.limit)
        with self.report.timed("ingest_s"):
            for line in check_input(self.job, self.setup, self.state).warnings:
                self.notice(line)
            index = self._index(context)
            self.state.purge_scratch(keep=index.folder.name)
            where = {"model": str(self.job.model.path), "completions": str(self.state.completions)}
            write_strings(index.folder / PARTIAL, where, self.state.ops)
        self.report.note(rows=index.rows)
        return index

    def _index(self, context: bytes) -> Index:
        options = IngestOptions(
            context=context,
            max_model_len=self.setting.max_model_len,
            vocab_size=self.checkpoint.spec.vocab,
            now=self.now,
        )

        def read(at: IngestProgress) -> None:
            self.progress.read(at.rows, at.bytes_read, at.bytes_total)

        return ingest(self.job, self.tokenizer, options, self.state.scratch, read, self.state.ops)

    def _refuse_hopeless(self, index: Index, budget: Budget) -> None:
        """Too many bad rows before the model is even loaded."""
        if budget.exceeded(index.error_rows) and not budget.publish:
            counts = ErrorCounts(index.rows, index.error_rows, 0, 0)
            raise self._over_budget(counts, budget, summarise_errors(index.index_parts))

    def _plan_rest(self, plan: Plan, others: list[OtherRun], index: Index, store: CompletionStore) -> Plan:
        """What is left once the others, which were there first, have answered what they compute of the same."""
        known, same = store.parts(), alike(plan.path, others, self.state.staging / "others")
        if same:
            self.progress.phase("waiting")
            self.notice(f"another run computes these rows already (in {store.path}); waiting for it")
            wait_for(same, self.progress.tick)
        store.refresh()
        return plan if store.parts() == known else self._plan(index, store, "plan-of-the-rest")

    def _plan(self, index: Index, store: CompletionStore, folder: str = "plan") -> Plan:
        self.progress.phase("planning")
        with self.report.timed("plan_s"):
            where, again = index.folder / folder, self.options.retry_errors
            spill = self.state.staging / "count"
            if again and not count_errors(index.index_parts, store.parts(), spill).retryable:
                self.notice("--retry-errors: no row has an error that is marked retryable; none is run again")
            plan = plan_job(index.index_dir, index.tokens, store.parts(), where, retry_errors=again)
            seen = forecast_run(self.job, self.setup, plan, index.tokens)
        self.report.planned(plan, seen.engine)
        self.progress.close()
        for line in (plan_line(plan), *seen.lines):
            self.notice(line)
        self.revised = RevisedForecast(seen.engine is None or seen.engine.upper_bound, self.notice)
        self.deadline = self._deadline(plan, seen.engine)
        self.report.note(**({} if self.deadline is None else self.deadline.facts))
        if self.job.sampling.from_columns:
            self.notice(f"rows set their own {self.job.sampling.row_parameters()}")
        return plan

    def _deadline(self, plan: Plan, seen: EngineForecast | None) -> DeadlineWatch | None:
        """Of a job with a deadline; says whether it will be met."""
        found = Deadline.of(self.job, self.now, seen)
        if found is not None and plan.to_run:
            self.notice(f"deadline: {found.text}")
        return None if found is None else DeadlineWatch(found, self.notice)

    def _execute(self, plan: Plan, index: Index, store: CompletionStore, budget: Budget) -> None:
        """The engine's part. On a signal: what runs may finish, all that is finished is committed."""
        setting = self.setting.for_rows(plan.to_run)
        config = setting.engine_config(self.job, plan.longest, index.logprobs)
        specs = worker_specs(self.job, setting, config, self.options.engine)
        meter = self.report.open_meter(setting, setting.model_cost(self.checkpoint))
        if index.error_rows:
            self.progress.failed(dict(summarise_errors(index.index_parts).codes))
        columns, budget = self.setup.columns, budget.starting_at(index.error_rows)
        check = AnswerCheck(columns, self.tokenizer)
        collector = Collector(store, meter, self.progress, budget, check, self.deadline, self.revised)
        for line in self.checkpoint.notices:
            self.notice(line)
        self.progress.phase("loading model")
        self.operators.needed()
        with (
            self.interrupts.deferred(),
            self.report.timed("close_s"),
            self._engines(specs, plan.to_run, index, plan.longest) as host,
        ):
            try:
                self._wait_until_ready(host)
                self.report.began(host.infos)
                self.progress.running(
                    rows=plan.to_run + plan.duplicates,
                    prompt_tokens=plan.prompt_tokens,
                    expected_tokens=plan.expected_tokens,
                )
                with self.report.timed("engine_s"):
                    run_plan(plan, index.tokens, host, collector, self.interrupts, self._draining)
            finally:
                store.commit()
                self.report.ran(host.infos, host.peak_rss, host.other_cores, host.expert_tokens)
                self.report.note(
                    worker_restarts=host.restarts,
                    duplicate_saved_tokens=collector.saved_tokens,
                    duplicate_saved_output_tokens=collector.saved_output_tokens,
                    **self.revised.facts,
                    **self.operators.facts,
                )
                self.report.note(**({} if self.deadline is None else self.deadline.facts))
        self.interrupts.raise_pending(
            f"interrupted; {len(store)} answers are stored and the same command continues from there"
        )

    def _engines(self, specs: Sequence[WorkerSpec], rows: int, index: Index, longest: int) -> ReplicaPool:
        def named(keys: Sequence[bytes]) -> str:
            return named_if_found(index.index_parts, keys, self.state.staging / "names")

        load = partial(self.report.timed, "load_s")
        step_s = partial(longest_step_s, self.setting, self.setting.model_cost(self.checkpoint), longest)
        how = self.options.transport
        return ReplicaPool(specs, rows, self.interrupts, named, self.notice, load, step_s, how)

    def _wait_until_ready(self, host: ReplicaPool) -> None:
        while host.info is None and self.interrupts.pending is None:
            host.receive(0.1)
            self.progress.tick()
            self.operators.look()

    def _draining(self, within_s: float) -> None:
        self.notice(
            f"stopping: rows in work may finish for up to {within_s:.0f} s; signal again to stop at once"
        )

    def _publish(self, context: bytes, index: Index, store: CompletionStore) -> tuple[Manifest, bool]:
        """What is published now, and whether that is anything new."""
        self.progress.phase("publishing", index.rows)
        index.inputs_unchanged()
        older, inputs = intact(self.state.results), identities(index)
        note_use(self.state, self.job.cache.keep, index.index_parts, store)
        manifest = publish(
            index,
            store.parts(),
            self._spec(context, inputs),
            self.tokenizer,
            self.state,
            replace=self.options.replace,
            on_rows=self.progress.rows,
        )
        if not self.job.input.sql:
            remember_inputs(self.state.published, index.inputs, inputs, self.state.ops)
        same = older is not None and older.manifest.generation == manifest.generation
        changed = not same or self.report.metered
        if changed:
            with told_by(self.notice):
                self.report.keep_keys(index.index_parts)
        return manifest, changed

    def _write_openai(self, files: Sequence[InputFile]) -> None:
        """The results are published by now: what fails here must not sound as if they were not."""
        if self.openai is None:
            return
        rows = asked(open_input(self.job, files), self.job.input.limit)
        created = int(self.now.timestamp()) if self.options.openai_timestamps else 0
        try:
            name, tokens = short_name(self.job.model.path), self.tokenizer.single
            write_openai(self.state.results, self.openai, rows, tokens, model=name, created=created)
        except (StorageError, OutputConflict, InputCorrupt) as error:
            raise type(error)(
                f"{error}. The results are published in {self.state.results}; only the file of --to-openai is "
                "missing: the same command writes it without computing anything again"
            ) from error

    def _tidy(self) -> None:
        self.state.purge_scratch()
        clean_after_run(self.state, self.job.cache.keep, lambda: self.interrupts.pending is None, self.notice)

    def _unreported(self, outcome: Outcome) -> Outcome:
        """A run that found everything published and unchanged leaves no file."""
        self.report.discard()
        return replace(outcome, report=None)

    def _judged(self, manifest: Manifest, status: str) -> Outcome:
        """What a published result means for the exit code: the same for the run that published it and every later."""
        note_made_by(self.state, MadeBy.of(self.job, self.options.limit))
        found = published(self.state.results) if manifest.errors else None
        codes = summarise_errors(() if found is None else found.files)
        self.report.note(
            rows=manifest.rows, rows_ok=manifest.ok, rows_error=manifest.errors, error_codes=dict(codes.codes)
        )
        budget = self._budget(manifest.rows)
        if not budget.exceeded(manifest.errors):
            return Outcome(0, self.report.done(status), report=self.report.path)
        counts = ErrorCounts(manifest.rows, manifest.errors, 0, codes.retryable)
        text = f"the results are {status}, but {budget_text(counts, budget, codes)}"
        code = ErrorBudgetExceeded.exit_code
        row, self.message = self.report.done(over_budget(status), code), text
        return Outcome(code, row, text, self.report.path)
