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
from batchinfer.input.reader import SampleSize, Strata
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.models.files.fingerprint import file_sha256
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.checks import check_device, check_kv_memory
from batchinfer.plan.setup.drafts import DraftModel, draft_heads, draft_model
from batchinfer.plan.setup.expert_places import expert_plan
from batchinfer.plan.setup.job_answers import (
    answer_columns,
    asked_answers,
    check_names,
    check_tokens,
    most_answer_tokens,
)
from batchinfer.plan.setup.resolve import resolve
from batchinfer.plan.setup.setting import PlacedModel, Setting
from batchinfer.plan.setup.weights import job_weights, quantization_warnings
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
    """The validated model, device and tokenizer of a job."""

    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    columns: SchemaColumns | None  # typed columns of `output.schema`
    output: OutputKind  # kind of answers
    asked: AskedAnswers  # parts of answers besides or instead of text
    most_tokens: int | None = None  # maximum answer tokens with `max_tokens: fit`
    workers: int = 1  # processes that read, render and tokenise rows
    drafts: DraftModel | None = None  # draft model that answers all rows first
    beside: DraftModel | None = None  # draft model in the job's engines
    adapters: Mapping[str, str] = field(default_factory=dict)  # fingerprints of adapters, by name

    @property
    def roots(self) -> ContentRoots:
        """Return the content roots of requests to this model."""
        roots = self.checkpoint.spec.content_roots(self.setting.numerics.max_model_len)
        return dataclasses.replace(roots, adapted=bool(self.adapters))

    @property
    def models(self) -> list[PlacedModel]:
        """Return the job's model, and the draft model that runs in the same engines, if any."""
        own = PlacedModel(self.checkpoint, self.setting)
        return (
            [own] if self.beside is None else [own, PlacedModel(self.beside.checkpoint, self.beside.setting)]
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the user."""
        return quantization_warnings(self.checkpoint, self.setting)

    @property
    def drafting(self) -> Setup | None:
        """Return the setup of a draft model that answers first, or None. It has no typed columns or adapters."""
        drafts = self.drafts
        if drafts is None:
            return None
        return dataclasses.replace(
            self,
            checkpoint=drafts.checkpoint,
            setting=drafts.setting,
            tokenizer=drafts.tokenizer,
            columns=None,
            drafts=None,
            beside=None,
            adapters={},
        )

    def ingest_options(
        self,
        context: bytes = b"",
        now: datetime | None = None,
        workers: int | None = None,
        sample: SampleSize | None = None,
        strata: Strata | None = None,
    ) -> IngestOptions:
        """Return how this model's input is read.

        Args:
            context: Digest for work keys. Without it, the index finds no stored answers.
            now: Time of the run. None: the current time.
            workers: Number of processes. None: as the job says.
            sample: Size of a sample of the first rows. None: all rows.
            strata: How to draw a sample from all of the input. None: all rows.
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
            asked=self.asked,
            adapters=self.adapters,
        )


def check_setup(
    job: Job,
    state: StateFolder,
    machine: MachineFacts,
    replace: bool = False,
    reader: MachineFacts | None = None,
) -> Setup:
    """Check a job, and return its setup.

    Args:
        job: The job.
        state: Its state folder.
        machine: The machine of the engines.
        replace: Whether the result may replace another one.
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
    kind, read = kind_of(job), asked_answers(job, tokenizer, checkpoint)
    if not checkpoint.spec.causal or not _shares_prefixes(job, read):
        setting = setting.with_parts(shares_prefixes=False)
    check_names(job, kind, read)
    columns = answer_columns(job, tokenizer, read)
    workers = ingest_workers(job, setting, reader or machine)
    most = most_answer_tokens(job, read.reasoning)
    drafts = draft_model(job, PlacedModel(checkpoint, setting), tokenizer, state)
    beside = drafts if drafts is not None and drafts.place.beside else None
    if beside is not None:
        setting = setting.with_parts(beside=beside.config)
    heads, experts = draft_heads(job, checkpoint, setting), expert_plan(job, checkpoint, setting)
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
        drafts=drafts if beside is None else None,
        beside=beside,
        adapters=weights.adapters,
    )
    check_kv_memory(job, setup.models)
    return setup


def _shares_prefixes(job: Job, read: AskedAnswers) -> bool:
    """Return False if each prompt must run as a whole.

    The cache has no hidden states and no logits, which some answers need for all tokens. The job may also
    disable sharing.
    """
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

    An engine on a GPU loads at the same time and keeps one core.
    """
    if job.input.workers != "auto":
        return job.input.workers
    keeps_cores = setting.device == "cuda" and not setting.placement.dedicated
    cores = (machine.cores or 1) - (setting.placement.replicas if keeps_cores else 0)
    return max(1, cores if machine.free_memory is None else min(cores, machine.free_memory // WORKER_BYTES))


def work_context(setup: Setup, state: StateFolder, remember: bool = False) -> bytes:
    """Return the digest of everything except the rows that determines answers: the first part of every work key.

    Hashes weight files with unknown digests. If `remember` is True, stores the digests in the state folder.
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
    return setup.setting.numerics.context(setup.checkpoint, model, tokenizer, columns=checked, output=kind)
