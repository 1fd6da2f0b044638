"""The answers of a job: what they have besides their text, or instead of one, and the columns that come of it."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.embedding import Embedding
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.data.columns.schema_columns import NoColumns, SchemaColumns, schema_columns
from batchinfer.data.constraints.constraint_check import constraint_problem
from batchinfer.data.constraints.generated_schema import parsed_schema
from batchinfer.data.outputs.kind import OutputKind
from batchinfer.data.prompts.parameters.vector_requests import VectorRequests
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.job.check import (
    ATTEMPT,
    CONFIDENCE,
    LOGPROBS,
    PROMPT_LOGPROBS,
    REASONING_COLUMNS,
    RESULT_COLUMNS,
    TOOL_CALLS_COLUMN,
)
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.job_calls import job_calls
from batchinfer.plan.setup.job_embedding import requested_vectors
from batchinfer.plan.setup.job_pairs import job_pairs
from batchinfer.plan.setup.job_reasoning import job_reasoning


@dataclass(frozen=True, slots=True)
class AskedAnswers:
    """Rows that ask for nothing beside their answers, which may have reasoning and calls."""

    reasoning: Reasoning | None
    tool_calls: CallStyle | None
    embedding: Embedding | None = None
    vectors: VectorRequests | None = None  # how OpenAI requests may ask for them
    no_vectors: str = ""  # why they may ask for none, where they may ask for texts
    scoring: Scoring | None = None
    pairs: PairScoring | None = None
    answers: None = None
    logprobs: None = None
    prompt_logprobs: bool = False
    confidence: None = None
    own_dimensions: bool = False


def asked_answers(job: Job, tokenizer: Tokenizer, checkpoint: StoredModel) -> AskedAnswers:
    """Return what the job asks of answers. Raises JobFileError."""
    embedding, vectors, no_vectors = requested_vectors(job, checkpoint.spec.hidden, checkpoint.spec.causal)
    pairs = job_pairs(job, tokenizer, checkpoint)
    if pairs is not None:
        return AskedAnswers(None, None, pairs=pairs)
    scoring = _scoring(job)
    if job.task != "generate":
        return AskedAnswers(None, None, embedding, vectors, scoring=scoring)
    return AskedAnswers(
        job_reasoning(job, tokenizer), job_calls(job, tokenizer), embedding, vectors, no_vectors
    )


def _scoring(job: Job) -> Scoring | None:
    if job.task == "score":
        return Scoring(per_token=job.score.per_token)
    if job.task == "rerank":
        return Scoring((job.rerank.yes, job.rerank.no))
    asked = job.classify
    if job.task != "classify":
        return None
    own = asked.choices_from_column is not None
    return Scoring(asked.choices, own, asked.length_normalized, content_free=asked.content_free)


def check_names(job: Job, kind: OutputKind, asked: AskedAnswers) -> None:
    """Raises JobFileError for a column that the job passes through under the name of one of its kind of answers."""
    ours = {name.casefold() for name in kind.schema(asked).names}
    for name in job.carried:
        if name.casefold() in ours:
            better = f"name it differently{_or_without(name)}"
            where = "output.columns" if name in job.output.columns else "input.expected"
            raise job.mistake(where, f"{name!r} is a column of the result; {better}")


def _or_without(name: str) -> str:
    """Return how a result comes without the column of that name, if it may."""
    if name.casefold() == TOOL_CALLS_COLUMN:
        return ", or set prompt.tool_calls to none"
    return ", or set prompt.reasoning to none" if name.casefold() in REASONING_COLUMNS else ""


def answer_columns(job: Job, tokenizer: Tokenizer, asked: AskedAnswers) -> SchemaColumns | None:
    """Return the columns of the job's schema, which can be followed. Raises JobFileError."""
    where = _constraint_key(job)
    if (problem := constraint_problem(job.params(), tokenizer.definition)) is not None:
        raise job.mistake(where, problem.partition(": ")[2] or problem)
    if job.output.json_schema is None:
        return None
    try:
        columns = schema_columns(parsed_schema(job.output.json_schema), job.output.column)
    except NoColumns as error:
        raise job.mistake(where, str(error)) from None
    read = REASONING_COLUMNS if asked.reasoning is not None else ()
    read = read if asked.tool_calls is None else (*read, TOOL_CALLS_COLUMN)
    more = (*([ATTEMPT] if job.on_invalid else []), *([CONFIDENCE] if job.output.confidence else []))
    ours = (*RESULT_COLUMNS, LOGPROBS, PROMPT_LOGPROBS, *more, *read)
    taken = {name.casefold(): name for name in (*ours, *job.carried)}
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


def check_followed(job: Job, tokenizer: Tokenizer) -> None:
    """Raises JobFileError where no constraint can be followed with this tokenizer, and the job has one."""
    if job.params().constraint is None:
        return
    from batchinfer.data.constraints.grammar_tokenizer import grammar_problem  # 8 MB, for those who need it

    if (problem := grammar_problem(tokenizer.definition)) is not None:
        raise job.mistake(_constraint_key(job), problem)
