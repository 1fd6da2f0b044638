"""The setup of a job is all but its rows, checked before anything is computed: checkpoint, device, tokenizer, results.

`run`, `plan`, `validate` and `preview` all call `check_setup`, so that they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import Unavailable
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
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
from batchinfer.machine.hardware import Hardware, nvidia_gpus
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.draft_model import DraftModel, draft_model
from batchinfer.plan.setup.ingest_workers import ingest_workers
from batchinfer.plan.setup.job_answers import answer_columns, asked_answers, check_names
from batchinfer.plan.setup.job_reasoning import most_answer_tokens
from batchinfer.plan.setup.job_tokens import check_tokens
from batchinfer.plan.setup.job_weights import job_weights
from batchinfer.plan.setup.resolve import Setting, resolve


@dataclass(frozen=True, slots=True)
class Setup:
    """A job's model, device and tokenizer, found right."""

    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer
    columns: SchemaColumns | None  # of answers that `output.schema` describes
    output: OutputKind  # of its answers
    most_tokens: int | None = None  # of an answer, where `sampling.max_tokens` is to fit the job's constraint
    workers: int = 1  # processes that read, render and tokenise rows
    # how its answers mark it; None: they have none, or keep it in their text
    reasoning: Reasoning | None = None
    # how they write calls of tools; None: no row can have tools, or calls are kept in the text
    tool_calls: CallStyle | None = None
    embedding: Embedding | None = None  # its vectors; None: it makes none
    scoring: Scoring | None = None  # what it scores; None: nothing
    pairs: PairScoring | None = None  # how it scores pairs; None: none
    drafts: DraftModel | None = None  # the model whose answers are drafts; None: there is none
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # fingerprints, by the names that rows have for them

    @property
    def roots(self) -> ContentRoots:
        """The content roots of requests to this model."""
        roots = self.checkpoint.spec.content_roots(self.setting.max_model_len)
        return dataclasses.replace(roots, adapted=bool(self.adapters))

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
        return IngestOptions(
            context=context,
            max_model_len=self.setting.max_model_len,
            vocab_size=self.checkpoint.spec.vocab,
            now=now or datetime.now().astimezone(),
            workers=workers or self.workers,
            sample=sample,
            strata=strata,
            output=self.output.name,
            reasoning=self.reasoning,
            tool_calls=self.tool_calls,
            embedding=self.embedding,
            scoring=self.scoring,
            pairs=self.pairs,
            adapters=self.adapters,
        )


def check_setup(
    job: Job, state: StateFolder, replace: bool = False, hardware: Hardware | None = None
) -> Setup:
    """`hardware`: a machine other than this one, for which the job is only planned.

    Raises JobFileError, SecurityRefusal, Unavailable, OutputConflict, StorageError and what the tokenizer raises."""
    checkpoint = open_checkpoint(job.model.path)
    if hardware is None:
        _check_device(job)
    setting = resolve(job, checkpoint, hardware)
    weights = job_weights(job, checkpoint, setting, state)
    checkpoint, setting = weights.checkpoint, weights.setting
    tokenizer = Tokenizer.load(job.model.path, given_template(job))
    check_templates(job)
    check_chat_template(job, tokenizer)
    check_destination(state.results, job.name, replace, ours=state.has_published)
    state.check_writable()
    state.refuse_newer()
    check_tokens(job, tokenizer, checkpoint.spec.vocab)
    kind, read = kind_of(job), asked_answers(job, tokenizer, checkpoint)
    whole = read.embedding is not None and read.embedding.pooling != "last"
    if whole or not checkpoint.spec.causal:
        setting = setting.without_sharing()
    check_names(job, kind, read)
    columns, workers = answer_columns(job, tokenizer, read), ingest_workers(job, setting)
    said = read.reasoning, read.tool_calls, read.embedding, read.scoring, read.pairs
    most = most_answer_tokens(job, read.reasoning)
    return Setup(
        checkpoint,
        setting,
        tokenizer,
        columns,
        kind,
        most,
        workers,
        *said,
        drafts=draft_model(job, tokenizer, state, hardware),
        adapters=weights.adapters,
    )


def _check_device(job: Job) -> None:
    """Refuse a GPU that the job names and that is not there. In a container nvidia-smi may be missing."""
    if job.engine.device != "cuda":
        return
    if version("torch").endswith("+cpu"):
        raise Unavailable(
            "engine.device is cuda, and the torch that is installed computes on CPUs only; "
            "use device: cpu, or install torch with CUDA"
        )
    if not nvidia_gpus() and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        raise Unavailable(
            "engine.device is cuda, and this machine has no NVIDIA GPU; use device: cpu, or auto"
        )
