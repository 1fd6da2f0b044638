"""The setup of a job is all but its rows, checked before anything is computed: checkpoint, device, tokenizer, results.

`run`, `plan`, `validate` and `preview` all call `check_setup`, so that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import Unavailable
from batchinfer.core.reasoning import Reasoning
from batchinfer.data.columns.schema_columns import NoColumns, SchemaColumns, schema_columns
from batchinfer.data.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.data.constraints.constraint_check import constraint_problem
from batchinfer.data.constraints.generated_schema import parsed_schema
from batchinfer.data.index.ingest import IngestOptions
from batchinfer.data.input.reader import SampleSize, Strata
from batchinfer.data.outputs.kind import OutputKind
from batchinfer.data.outputs.registry import kind_of
from batchinfer.data.prompts.mode import check_chat_template, check_templates, given_template
from batchinfer.data.results.manifest import check_destination
from batchinfer.data.storage.state import StateFolder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.job.check import ATTEMPT, LOGPROBS, REASONING_COLUMNS, RESULT_COLUMNS
from batchinfer.machine.hardware import Hardware, nvidia_gpus
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.ingest_workers import ingest_workers
from batchinfer.plan.setup.job_embedding import job_embedding
from batchinfer.plan.setup.job_reasoning import job_reasoning, most_with_reasoning
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
    reasoning: Reasoning | None = (
        None  # how its answers mark it; None: they have none, or keep it in their text
    )
    embedding: Embedding | None = None  # its vectors; None: it generates texts

    @property
    def roots(self) -> ContentRoots:
        """The content roots of requests to this model."""
        return self.checkpoint.spec.content_roots(self.setting.max_model_len)

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
            embedding=self.embedding,
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
    if setting.quantization == "stored":
        checkpoint = checkpoint.as_stored()
    tokenizer = Tokenizer.load(job.model.path, given_template(job))
    check_templates(job)
    check_chat_template(job, tokenizer)
    check_destination(state.results, job.name, replace, ours=state.has_published)
    state.check_writable()
    state.refuse_newer()
    _check_followed(job, tokenizer)
    kind, embedding = kind_of(job), job_embedding(job, checkpoint.spec.hidden)
    reasoning = job_reasoning(job, tokenizer) if embedding is None else None
    if embedding is not None and embedding.pooling == "mean":
        setting = setting.without_sharing()
    _check_names(job, kind, _Asked(reasoning, embedding))
    columns, workers = _columns(job, tokenizer, reasoning), ingest_workers(job, setting)
    most = _most_tokens(job, reasoning)
    return Setup(checkpoint, setting, tokenizer, columns, kind, most, workers, reasoning, embedding)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Rows that ask for nothing beside their answers, which may have reasoning."""

    reasoning: Reasoning | None
    embedding: Embedding | None
    answers: None = None
    logprobs: None = None


def _check_names(job: Job, kind: OutputKind, asked: _Asked) -> None:
    """Raises JobFileError for a column that the job passes through under the name of one of its kind of answers."""
    ours = {name.casefold() for name in kind.schema(asked).names}
    for name in job.output.columns:
        if name.casefold() in ours:
            better = f"name it differently{_or_without(name)}"
            raise job.mistake("output.columns", f"{name!r} is a column of the result; {better}")


def _or_without(name: str) -> str:
    """Return how a result comes without the column of that name, if it may."""
    return ", or set prompt.reasoning to none" if name.casefold() in REASONING_COLUMNS else ""


def _check_followed(job: Job, tokenizer: Tokenizer) -> None:
    """Raises JobFileError where no constraint can be followed with this tokenizer, and the job has one."""
    if job.params().constraint is None:
        return
    from batchinfer.data.constraints.grammar_tokenizer import grammar_problem  # 8 MB, for those who need it

    if (problem := grammar_problem(tokenizer.definition)) is not None:
        raise job.mistake(_constraint_key(job), problem)


def _most_tokens(job: Job, reasoning: Reasoning | None) -> int | None:
    """Return the most tokens of an answer, where they are known. Raises JobFileError where the job's constraint has no
    bound to fit."""
    params = job.params()
    if not job.sampling.fits or params.constraint is None:
        return None
    try:
        return most_with_reasoning(most_tokens(params), params, reasoning)
    except Unbounded as error:
        raise job.mistake("sampling.max_tokens", f"is fit, and answers have no bound: {error}") from None


def _columns(job: Job, tokenizer: Tokenizer, reasoning: Reasoning | None) -> SchemaColumns | None:
    """The columns of the job's schema, which can be followed. Raises JobFileError."""
    where = _constraint_key(job)
    if (problem := constraint_problem(job.params(), tokenizer.definition)) is not None:
        raise job.mistake(where, problem.partition(": ")[2] or problem)
    if job.output.json_schema is None:
        return None
    try:
        columns = schema_columns(parsed_schema(job.output.json_schema), job.output.column)
    except NoColumns as error:
        raise job.mistake(where, str(error)) from None
    reasons = REASONING_COLUMNS if reasoning is not None else ()
    ours = (*RESULT_COLUMNS, LOGPROBS, *([ATTEMPT] if job.on_invalid else []), *reasons)
    taken = {name.casefold(): name for name in (*ours, *job.output.columns)}
    for name in columns.schema.names:
        if name.casefold() in taken:
            text = f"its property {name!r} has the name of another column of the result; give output.column a name"
            raise job.mistake(where, text + _or_without(name))
    return columns


def _constraint_key(job: Job) -> str:
    """Return the key of the job file that says what answers look like."""
    if job.output.schema_file is not None:
        return "output.schema_file"
    return "output.schema" if job.output.json_schema is not None else f"sampling.{job.params().constraint}"


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
