"""Sets up a job: checks checkpoint, device, tokenizer and result folder before anything is computed.

`run`, `plan`, `validate` and `preview` all call `check_setup`, so they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.hub import ADAPTER_WEIGHTS
from batchinfer.filesystem.json_files import read_strings, write_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.prompts.mode import check_chat_template, check_templates, given_template
from batchinfer.input.reader import SampleSize, SpreadSample
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.models.files.fingerprint import file_sha256
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.checks import check_device, check_kv_memory
from batchinfer.plan.setup.drafts import DraftModel, open_draft_heads, open_draft_model
from batchinfer.plan.setup.expert_places import expert_plan
from batchinfer.plan.setup.job_answers import (
    answer_columns,
    check_names,
    check_tokens,
    most_answer_tokens,
    requested_answers,
)
from batchinfer.plan.setup.resolve import resolve
from batchinfer.plan.setup.setting import PlacedModel, Setting
from batchinfer.plan.setup.weights import job_weights
from batchinfer.report.tables.folder import check_report_folder, report_folder
from batchinfer.store.columns.answer_check import CHECK_VERSION
from batchinfer.store.columns.schema_columns import SchemaColumns
from batchinfer.store.index.ingest_options import AskedAnswers, IngestOptions
from batchinfer.store.outputs.kind import OutputKind
from batchinfer.store.outputs.registry import kind_of
from batchinfer.store.results.manifest import check_destination

# Memory of a process that reads rows. Measured: 135 MiB with a vocabulary of 32,000 tokens.
WORKER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """The results of checking a job, which a run needs before it reads rows: model, setting, tokenizer and more.

    Attributes:
        checkpoint: The job's model.
        setting: Device, arithmetic, memory and parallelism.
        tokenizer: The tokenizer of the job's model.
        columns: Typed result columns of `output.schema`, or None.
        output: The kind of answers: tokens, vectors or scores.
        requested: The parts of answers that the job requests, such as reasoning and tool calls.
        most_tokens: Maximum number of tokens of an answer if the job has `max_tokens: fit`, else None.
        workers: Number of processes that read, render and tokenise rows.
        first_draft_model: Draft model that answers all rows before the job's model is loaded, or None.
        engine_draft_model: Draft model in the same engines as the job's model, or None.
        adapters: Fingerprints of adapters, by the names that rows use.
    """

    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    columns: SchemaColumns | None
    output: OutputKind
    requested: AskedAnswers
    most_tokens: int | None = None
    workers: int = 1
    first_draft_model: DraftModel | None = None
    engine_draft_model: DraftModel | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def roots(self) -> ContentRoots:
        """Return an object that tells which requests to the job's model may share cached prefixes.

        For example, requests with different adapters may not.
        """
        roots = self.checkpoint.spec.content_roots(self.setting.numerics.max_model_len)
        return dataclasses.replace(roots, adapted=bool(self.adapters))

    @property
    def models(self) -> list[PlacedModel]:
        """Return the models of each engine: the job's model, then a draft model in the same engine, if any."""
        own = PlacedModel(self.checkpoint, self.setting)
        return (
            [own]
            if self.engine_draft_model is None
            else [own, PlacedModel(self.engine_draft_model.checkpoint, self.engine_draft_model.setting)]
        )

    @property
    def drafting(self) -> Setup | None:
        """Return the setup of the draft model that answers all rows first, or None without such a model.

        In the returned setup, the draft model replaces the job's model. There are no typed columns and no adapters.
        """
        drafts = self.first_draft_model
        if drafts is None:
            return None
        return dataclasses.replace(
            self,
            checkpoint=drafts.checkpoint,
            setting=drafts.setting,
            tokenizer=drafts.tokenizer,
            columns=None,
            first_draft_model=None,
            engine_draft_model=None,
            adapters={},
        )

    def ingest_options(
        self,
        context: bytes = b"",
        now: datetime | None = None,
        workers: int | None = None,
        sample: SampleSize | None = None,
        strata: SpreadSample | None = None,
    ) -> IngestOptions:
        """Return options for reading, rendering and tokenising the job's input.

        Args:
            context: The first part of all work keys, from `work_context`. The default is enough if no work key is
                looked up in the store.
            now: Time of the run, for templates. None: the current time.
            workers: Number of processes. None: the number of this setup.
            sample: Number of first rows to read per file. None: all rows.
            strata: How to draw a sample from the whole input. None: all rows.
        """
        return IngestOptions(
            context=context,
            max_model_len=self.setting.numerics.max_model_len,
            vocab_size=self.checkpoint.spec.vocab,
            now=now or datetime.now().astimezone(),
            workers=workers or self.workers,
            sample=sample,
            strata=strata,
            output=self.output.name,
            asked=self.requested,
            adapters=self.adapters,
        )


def check_setup(
    job: Job,
    state: StateFolder,
    machine: MachineFacts,
    replace: bool = False,
    reader: MachineFacts | None = None,
) -> Setup:
    """Check a job against its model, machine and result folder, and return its model, tokenizer and setting.

    Args:
        job: The job.
        state: The job's state folder.
        machine: The machine of the engines.
        replace: Whether the result may replace the result of another job.
        reader: The machine that reads the rows. None: `machine`.

    Raises:
        BatchInferError: The job cannot run.
    """
    checkpoint = open_checkpoint(job.model.path)
    check_device(job, machine)
    setting = resolve(job, checkpoint, machine)
    weights = job_weights(job, checkpoint, setting, state)
    checkpoint, setting = weights.checkpoint, weights.setting
    tokenizer = Tokenizer.load(job.model.path, given_template(job))
    check_templates(job)
    check_chat_template(job, tokenizer)
    check_destination(state.destination, job.name, replace, ours=state.has_published)
    check_report_folder(report_folder(job.results_root))
    state.check_writable()
    state.refuse_newer()
    check_tokens(job, tokenizer, checkpoint.spec.vocab)
    kind, read = kind_of(job), requested_answers(job, tokenizer, checkpoint)
    if not checkpoint.spec.causal or not _shares_prefixes(job, read):
        setting = setting.with_parts(shares_prefixes=False)
    check_names(job, kind, read)
    columns = answer_columns(job, tokenizer, read)
    workers = ingest_workers(job, setting, reader or machine)
    most = most_answer_tokens(job, read.reasoning)
    drafts = open_draft_model(job, PlacedModel(checkpoint, setting), tokenizer, state)
    in_engine = drafts if drafts is not None and drafts.place.in_engine else None
    if in_engine is not None:
        setting = setting.with_parts(draft_model=in_engine.config)
    heads, experts = open_draft_heads(job, checkpoint, setting), expert_plan(job, checkpoint, setting)
    setting = setting.with_parts(heads=heads, experts=experts)
    setup = Setup(
        checkpoint,
        setting,
        tokenizer,
        columns,
        kind,
        read,
        most,
        workers,
        first_draft_model=drafts if in_engine is None else None,
        engine_draft_model=in_engine,
        adapters=weights.adapters,
    )
    check_kv_memory(job, setup.models)
    return setup


def _shares_prefixes(job: Job, read: AskedAnswers) -> bool:
    # Some answers need a hidden state or logits of every prompt token, which the cache lacks
    if job.task == "embed":
        whole = read.embedding is not None and read.embedding.pooling != "last"
    elif job.task == "score":
        whole = job.score.continuation is None
    else:
        whole = (
            job.sampling.prompt_logprobs is not None and not job.sampling.from_columns and not job.requests
        )
    return job.engine.enable_prefix_caching and not whole


def ingest_workers(job: Job, setting: Setting, machine: MachineFacts) -> int:
    """Return the number of processes that read rows: one per core, limited by free memory.

    One core per engine is left free if engines on GPUs of the same machine load at the same time.

    Args:
        job: The job, which may set the number.
        setting: The job's device, arithmetic, memory and parallelism.
        machine: The machine that reads the rows.
    """
    if job.input.workers != "auto":
        return job.input.workers
    keeps_cores = setting.device == "cuda" and not setting.placement.dedicated
    cores = (machine.cores or 1) - (setting.placement.replicas if keeps_cores else 0)
    return max(1, cores if machine.free_memory is None else min(cores, machine.free_memory // WORKER_BYTES))


def work_context(
    setup: Setup, state: StateFolder, remember: bool = False, version: int | None = None
) -> bytes:
    """Return the first part of every work key: a digest of everything that determines answers, except the rows.

    The digest contains digests of the weight files. Files whose digests are not known yet are hashed.

    Args:
        setup: The job's model, tokenizer and setting.
        state: The job's state folder, which stores known digests.
        remember: Whether to store new digests of files there.
        version: Version of the arithmetic of quantised weights. None: the current one.
    """
    digests = read_strings(state.fingerprints)
    before = dict(digests)
    model = setup.checkpoint.fingerprint(digests)
    for _, folder in setup.setting.parts.adapters:
        file_sha256(folder / ADAPTER_WEIGHTS, digests, lambda _: None)
    if remember and digests != before:
        with state.lock_shared():
            write_strings(state.fingerprints, digests, state.ops)
    checked = 0 if setup.columns is None else CHECK_VERSION
    kind, tokenizer = setup.output.name, setup.tokenizer.fingerprint
    numerics = setup.setting.numerics
    return numerics.context(setup.checkpoint, model, tokenizer, checked, kind, version)
