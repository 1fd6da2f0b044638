"""The setup of a job: checkpoint, device, tokenizer and results, checked before anything is computed.

`run`, `plan`, `validate` and `preview` all call `check_setup`, so that they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.hub import ADAPTER_WEIGHTS
from batchinfer.filesystem.remembered import read_strings, write_strings
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
    AskedAnswers,
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
from batchinfer.store.index.ingest_options import IngestOptions
from batchinfer.store.outputs.kind import OutputKind
from batchinfer.store.outputs.registry import kind_of
from batchinfer.store.results.manifest import check_destination

# Of one process that reads rows. Measured: 135 MiB with a vocabulary of 32,000 tokens.
WORKER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's model, device and tokenizer, found right."""

    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    columns: SchemaColumns | None  # of answers that `output.schema` describes
    output: OutputKind  # of its answers
    asked: AskedAnswers  # what these have besides, or in the place of texts
    most_tokens: int | None = None  # of an answer, where `sampling.max_tokens` is to fit the job's constraint
    workers: int = 1  # processes that read, render and tokenise rows
    drafts: DraftModel | None = (
        None  # the model whose answers are drafts, which come first; None: there is none
    )
    beside: DraftModel | None = None  # the model that proposes tokens beside the job's; None: there is none
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # fingerprints, by the names that rows have for them

    @property
    def roots(self) -> ContentRoots:
        """The content roots of requests to this model."""
        roots = self.checkpoint.spec.content_roots(self.setting.numerics.max_model_len)
        return dataclasses.replace(roots, adapted=bool(self.adapters))

    @property
    def models(self) -> list[PlacedModel]:
        """The job's model, and the draft model that runs in the same engines if there is one."""
        own = PlacedModel(self.checkpoint, self.setting)
        return (
            [own] if self.beside is None else [own, PlacedModel(self.beside.checkpoint, self.beside.setting)]
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about the job that the user should read before it runs."""
        return quantization_warnings(self.checkpoint, self.setting)

    @property
    def drafting(self) -> Setup | None:
        """Return the setup with which the draft model runs; None: there is none. Its answers are no columns, and no row
        has an adapter."""
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
        """Return how this model's input is read. An index without the `context` of its keys finds no stored answer.

        `now`: the moment of the run, where it is not this one. `workers`: another number of processes than the job's.
        """
        asked = self.asked
        return IngestOptions(
            context=context,
            max_model_len=self.setting.numerics.max_model_len,
            vocab_size=self.checkpoint.spec.vocab,
            now=now or datetime.now().astimezone(),
            workers=workers or self.workers,
            sample=sample,
            strata=strata,
            output=self.output.name,
            reasoning=asked.reasoning,
            tool_calls=asked.tool_calls,
            embedding=asked.embedding,
            vectors=asked.vectors,
            no_vectors=asked.no_vectors,
            scoring=asked.scoring,
            pairs=asked.pairs,
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
        state: Its folder.
        machine: The machine on which engines run.
        replace: Whether the result may replace another one.
        reader: The machine that reads the rows; None: the same one.

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
    """Return False if each prompt runs as a whole: because the job says so, or because its answers need the hidden
    states or the logits of all tokens, which the cache does not have."""
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
    """Return how many processes read the job's rows: one for each core, if there is memory for all. An engine on a CPU
    computes later; an engine on a GPU is loaded meanwhile, and keeps a core."""
    if job.input.workers != "auto":
        return job.input.workers
    keeps_cores = setting.device == "cuda" and not setting.placement.apart
    cores = (machine.cores or 1) - (setting.placement.replicas if keeps_cores else 0)
    return max(1, cores if machine.free_memory is None else min(cores, machine.free_memory // WORKER_BYTES))


def work_context(setup: Setup, state: StateFolder, remember: bool = False) -> bytes:
    """Return the digest of all but the rows that decides an answer: the first part of every work key.

    Weight files whose digest the state does not know are hashed; `remember`: the state is to know it afterwards.
    """
    digests = read_strings(state.fingerprints)
    before = dict(digests)
    model = setup.checkpoint.fingerprint(digests)
    for _, folder in setup.setting.parts.adapters:
        file_sha256(folder / ADAPTER_WEIGHTS, digests, lambda _: None)
    if remember and digests != before:
        with state.exclusively():
            write_strings(state.fingerprints, digests, state.ops)
    checked = 0 if setup.columns is None else CHECK_VERSION
    kind, tokenizer = setup.output.name, setup.tokenizer.fingerprint
    return setup.setting.numerics.context(setup.checkpoint, model, tokenizer, columns=checked, output=kind)
