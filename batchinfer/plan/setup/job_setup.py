"""The setup of a job is all but its rows, checked before anything is computed: checkpoint, device, tokenizer, results.

`run`, `plan`, `validate` and `preview` all call `check_setup`, so that they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from batchinfer.core.content_root import ContentRoots
from batchinfer.data.columns.schema_columns import SchemaColumns
from batchinfer.data.index.ingest_options import IngestOptions
from batchinfer.data.input.reader import SampleSize, Strata
from batchinfer.data.outputs.kind import OutputKind
from batchinfer.data.outputs.registry import kind_of
from batchinfer.data.prompts.mode import check_chat_template, check_templates, given_template
from batchinfer.data.results.manifest import check_destination
from batchinfer.data.storage.state import StateFolder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.machine.hardware import Hardware
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.check_device import check_device, check_kv_memory
from batchinfer.plan.setup.draft_heads import draft_heads
from batchinfer.plan.setup.draft_model import DraftModel, draft_model
from batchinfer.plan.setup.draft_place import PlacedModel
from batchinfer.plan.setup.expert_places import expert_plan
from batchinfer.plan.setup.ingest_workers import ingest_workers
from batchinfer.plan.setup.job_answers import AskedAnswers, answer_columns, asked_answers, check_names
from batchinfer.plan.setup.job_reasoning import most_answer_tokens
from batchinfer.plan.setup.job_tokens import check_tokens
from batchinfer.plan.setup.job_weights import job_weights, quantization_warnings
from batchinfer.plan.setup.resolve import Setting, resolve
from batchinfer.report.tables.folder import check_report_folder, report_folder


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
        roots = self.checkpoint.spec.content_roots(self.setting.max_model_len)
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
            max_model_len=self.setting.max_model_len,
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
    job: Job, state: StateFolder, replace: bool = False, hardware: Hardware | None = None
) -> Setup:
    """`hardware`: a machine other than this one, for which the job is only planned.

    Raises JobFileError, SecurityRefusal, Unavailable, OutputConflict, StorageError and what the tokenizer raises."""
    checkpoint = open_checkpoint(job.model.path)
    if hardware is None:
        check_device(job)
    setting = resolve(job, checkpoint, hardware)
    weights = job_weights(job, checkpoint, setting, state)
    checkpoint, setting = weights.checkpoint, weights.setting
    tokenizer = Tokenizer.load(job.model.path, given_template(job))
    check_templates(job)
    check_chat_template(job, tokenizer)
    check_destination(state.results, job.name, replace, ours=state.has_published)
    check_report_folder(report_folder(job.results_root))
    state.check_writable()
    state.refuse_newer()
    check_tokens(job, tokenizer, checkpoint.spec.vocab)
    kind, read = kind_of(job), asked_answers(job, tokenizer, checkpoint)
    if not checkpoint.spec.causal or not _shares_prefixes(job, read):
        setting = setting.without_sharing()
    check_names(job, kind, read)
    columns, workers = answer_columns(job, tokenizer, read), ingest_workers(job, setting)
    most = most_answer_tokens(job, read.reasoning)
    drafts = draft_model(job, PlacedModel(checkpoint, setting), tokenizer, state, hardware)
    beside = drafts if drafts is not None and drafts.place.beside else None
    if beside is not None:
        setting = dataclasses.replace(setting, beside=beside.config)
    heads, experts = draft_heads(job, checkpoint, setting), expert_plan(job, checkpoint, setting)
    setting = dataclasses.replace(setting, heads=heads, experts=experts)
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
