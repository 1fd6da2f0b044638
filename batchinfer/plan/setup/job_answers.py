"""The answers of a job: what they have besides their text, or instead of one, and the columns that come of it."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.embedding import Embedding
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.constraints.answer_bound import Unbounded, most_tokens
from batchinfer.input.constraints.constraint_check import constraint_problem
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.prompts.fits import with_reasoning
from batchinfer.input.prompts.parameters.named_tokens import NamedTokens
from batchinfer.input.prompts.parameters.vector_requests import VectorRequests
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.reasoning_styles import find_reasoning
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls.call_grammar import UNASKED
from batchinfer.input.tool_calls.call_styles import find_call_style
from batchinfer.job import Job
from batchinfer.job.check import (
    ATTEMPT,
    CONFIDENCE,
    ENGINE_CLASS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    REASONING_COLUMNS,
    RESULT_COLUMNS,
    TOOL_CALLS_COLUMN,
)
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.job_vectors import job_pairs, requested_vectors
from batchinfer.store.columns.schema_columns import NoColumns, SchemaColumns, schema_columns
from batchinfer.store.outputs.kind import OutputKind


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
    more = (*more, ENGINE_CLASS) if job.mixes_classes else more
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
    from batchinfer.input.constraints.grammar_tokenizer import grammar_problem  # 8 MB, for those who need it

    if (problem := grammar_problem(tokenizer.definition)) is not None:
        raise job.mistake(_constraint_key(job), problem)


def job_calls(job: Job, tokenizer: Tokenizer) -> CallStyle | None:
    """Return how the job's answers write calls; None: no row can have tools, or calls are not told from text. Raises
    JobFileError for a style whose tokens the checkpoint lacks."""
    said = "auto" if job.prompt is None else job.prompt.tool_calls
    if not (job.requests or (job.prompt is not None and job.prompt.may_call)):
        return None
    found = find_call_style(said, tokenizer)
    if found is None and said not in ("auto", "none"):
        raise job.mistake("prompt.tool_calls", f"is {said}, and the tokenizer lacks the tokens of this style")
    if job.prompt is not None and job.prompt.asked_call:
        _check_choice(job, found)
    return found


def _check_choice(job: Job, style: CallStyle | None) -> None:
    """Raise JobFileError if the call that the job asks for cannot be a constraint on its answers."""
    constraint = job.params().constraint
    if style is None:
        why = "nothing shows how the checkpoint writes calls; name the style in prompt.tool_calls"
    elif style.name in UNASKED:
        why = f"calls in the style {style.name} cannot be asked for; write auto"
    elif constraint is not None:
        why = f"an answer can have only one constraint, and the job has {constraint}"
    elif job.sampling.fits:
        why = "the longest call of a tool is not known, so that max_tokens: fit does not go with it"
    else:
        return
    raise job.mistake("prompt.tool_choice", f"is given, but {why}")


def job_reasoning(job: Job, tokenizer: Tokenizer) -> Reasoning | None:
    """Return how the job's answers mark their reasoning; None: they have none, or keep it in their text. Raises
    JobFileError for a budget of reasoning that has no tokens to end it with."""
    found = find_reasoning("auto" if job.prompt is None else job.prompt.reasoning, tokenizer)
    where = _limited_by(job)
    if where is not None and (found is None or found.tokens is None):
        text = "thinking_budget: the checkpoint's chat template names no tokens around reasoning"
        raise job.mistake(where, f"{text}; name them in prompt.reasoning, or remove it")
    return found


def _limited_by(job: Job) -> str | None:
    """Return the key of the job file that limits reasoning, if one does."""
    if job.sampling.thinking_budget is not None:
        return "sampling.thinking_budget"
    if "thinking_budget" in dict(job.sampling.from_columns):
        return "sampling.from_columns"
    return "on_invalid" if any("thinking_budget" in rung for rung in job.on_invalid) else None


def most_with_reasoning(most: int, params: SamplingParams, reasoning: Reasoning | None) -> int | None:
    """Return the most tokens of an answer of at most `most` tokens with its reasoning; None: it has no bound."""
    found = with_reasoning(most, params.thinking_budget, reasoning)
    return found if found < INT32_MAX else None


def most_answer_tokens(job: Job, reasoning: Reasoning | None) -> int | None:
    """Return the most tokens of an answer, where they are known. Raises JobFileError where the job's constraint has no
    bound to fit."""
    params = job.params()
    if not job.sampling.fits or params.constraint is None:
        return None
    try:
        return most_with_reasoning(most_tokens(params), params, reasoning)
    except Unbounded as error:
        raise job.mistake("sampling.max_tokens", f"is fit, and answers have no bound: {error}") from None


def check_tokens(job: Job, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises JobFileError for a token that the model does not have, and as `check_followed`."""
    check_followed(job, tokenizer)
    try:
        NamedTokens(tokenizer, vocab_size).named(job.params())
    except RowProblem as problem:
        name, _, message = problem.error.message.partition(": ")
        raise job.mistake(f"sampling.{name}", message) from None
