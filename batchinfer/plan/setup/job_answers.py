"""Determines the parts of a job's answers, such as text, vectors and scores, and the result columns for them."""

from __future__ import annotations

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.core.scoring import Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.constraints.answer_bound import UnboundedAnswer, most_tokens
from batchinfer.input.constraints.constraint_check import constraint_problem
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.input.prompts.fits import with_reasoning
from batchinfer.input.prompts.parameters.named_tokens import NamedTokens
from batchinfer.input.rows import RowProblem
from batchinfer.input.tokenizer.reasoning_styles import find_reasoning
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls.call_grammar import STYLES_WITHOUT_GRAMMAR
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
from batchinfer.store.index.ingest_options import AskedAnswers
from batchinfer.store.outputs.kind import OutputKind


def requested_answers(job: Job, tokenizer: Tokenizer, checkpoint: StoredModel) -> AskedAnswers:
    """Return the parts of answers that the job requests: separate reasoning, tool calls, vectors or scores.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.
        checkpoint: The job's model.

    Raises:
        JobFileError: The model or its tokenizer does not support the request.
    """
    embedding, vectors, no_vectors = requested_vectors(job, checkpoint.spec.hidden, checkpoint.spec.causal)
    pairs = job_pairs(job, tokenizer, checkpoint)
    if pairs is not None:
        return AskedAnswers(pairs=pairs)
    scoring = _scoring(job)
    if job.task != "generate":
        return AskedAnswers(embedding=embedding, vectors=vectors, scoring=scoring)
    return AskedAnswers(
        reasoning=job_reasoning(job, tokenizer),
        tool_calls=job_calls(job, tokenizer),
        embedding=embedding,
        vectors=vectors,
        no_vectors=no_vectors,
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
    """Raise JobFileError if an input column that is copied to the result has the name of another result column.

    Args:
        job: The job.
        kind: The kind of the job's answers, which determines the columns of the result.
        asked: The parts of answers that the job requests, such as reasoning and tool calls.
    """
    ours = {name.casefold() for name in kind.schema(asked).names}
    for name in job.carried:
        if name.casefold() in ours:
            better = f"name it differently{_or_without(name)}"
            where = "output.columns" if name in job.output.columns else "input.expected"
            raise job.mistake(where, f"{name!r} is a column of the result; {better}")


def _or_without(name: str) -> str:
    if name.casefold() == TOOL_CALLS_COLUMN:
        return ", or set prompt.tool_calls to none"
    return ", or set prompt.reasoning to none" if name.casefold() in REASONING_COLUMNS else ""


def answer_columns(job: Job, tokenizer: Tokenizer, asked: AskedAnswers) -> SchemaColumns | None:
    """Return the typed result columns for the job's JSON schema, or None if the job has no schema.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.
        asked: The parts of answers that the job requests, such as reasoning. Their columns must have other names than
            the typed columns.

    Raises:
        JobFileError: The schema or another constraint cannot be enforced, or a column name occurs twice.
    """
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
    if job.output.schema_file is not None:
        return "output.schema_file"
    return "output.schema" if job.output.json_schema is not None else f"sampling.{job.params().constraint}"


def check_followed(job: Job, tokenizer: Tokenizer) -> None:
    """Raise JobFileError if the job has a constraint and its tokenizer supports no constraints."""
    if job.params().constraint is None:
        return
    from batchinfer.input.constraints.grammar_tokenizer import (
        grammar_problem,
    )  # 8 MB, so imported only if needed

    if (problem := grammar_problem(tokenizer.definition)) is not None:
        raise job.mistake(_constraint_key(job), problem)


def job_calls(job: Job, tokenizer: Tokenizer) -> CallStyle | None:
    """Return the format of the tool calls that are parsed from answers.

    Returns None if the job has no tools, or if tool calls are not parsed but stay in the text of the answer.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.

    Raises:
        JobFileError: The tokenizer lacks the tokens of the format, or the job requires a call that cannot be enforced.
    """
    said = "auto" if job.prompt is None else job.prompt.tool_calls
    if not (job.requests or (job.prompt is not None and job.prompt.may_call)):
        return None
    found = find_call_style(said, tokenizer)
    if found is None and said not in ("auto", "none"):
        raise job.mistake("prompt.tool_calls", f"is {said}, and the tokenizer lacks the tokens of this style")
    if job.prompt is not None and job.prompt.forced_call:
        _check_choice(job, found)
    return found


def _check_choice(job: Job, style: CallStyle | None) -> None:
    constraint = job.params().constraint
    if style is None:
        why = "nothing shows how the checkpoint writes calls; name the style in prompt.tool_calls"
    elif style.name in STYLES_WITHOUT_GRAMMAR:
        why = f"calls in the style {style.name} cannot be asked for; write auto"
    elif constraint is not None:
        why = f"an answer can have only one constraint, and the job has {constraint}"
    elif job.sampling.fits:
        why = "the longest call of a tool is not known, so that max_tokens: fit does not go with it"
    else:
        return
    raise job.mistake("prompt.tool_choice", f"is given, but {why}")


def job_reasoning(job: Job, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the markers that begin and end the reasoning in answers.

    Returns None if reasoning is not separated from the text of the answer.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.

    Raises:
        JobFileError: The job has a thinking budget, and no tokens mark the end of reasoning.
    """
    found = find_reasoning("auto" if job.prompt is None else job.prompt.reasoning, tokenizer)
    where = _limited_by(job)
    if where is not None and (found is None or found.tokens is None):
        text = "thinking_budget: the checkpoint's chat template names no tokens around reasoning"
        raise job.mistake(where, f"{text}; name them in prompt.reasoning, or remove it")
    return found


def _limited_by(job: Job) -> str | None:
    if job.sampling.thinking_budget is not None:
        return "sampling.thinking_budget"
    if "thinking_budget" in dict(job.sampling.from_columns):
        return "sampling.from_columns"
    return "on_invalid" if any("thinking_budget" in rung for rung in job.on_invalid) else None


def most_with_reasoning(most: int, params: SamplingParams, reasoning: Reasoning | None) -> int | None:
    """Return the maximum number of tokens of an answer including its reasoning, or None if there is no maximum.

    Args:
        most: Maximum number of tokens of the answer without reasoning.
        params: Sampling parameters with the thinking budget.
        reasoning: The markers that begin and end reasoning. None: answers have no separate reasoning.
    """
    found = with_reasoning(most, params.thinking_budget, reasoning)
    return found if found < INT32_MAX else None


def most_answer_tokens(job: Job, reasoning: Reasoning | None) -> int | None:
    """Return the maximum number of tokens of an answer if the job has `max_tokens: fit`.

    It is the length of the longest answer that matches the job's constraint, reasoning included. Returns None without
    `max_tokens: fit`, if the job itself has no constraint, or if reasoning has no maximum length.

    Args:
        job: The job.
        reasoning: The markers that begin and end reasoning. None: answers have no separate reasoning.

    Raises:
        JobFileError: Answers that match the constraint have no maximum length.
    """
    params = job.params()
    if not job.sampling.fits or params.constraint is None:
        return None
    try:
        return most_with_reasoning(most_tokens(params), params, reasoning)
    except UnboundedAnswer as error:
        raise job.mistake("sampling.max_tokens", f"is fit, and answers have no bound: {error}") from None


def check_tokens(job: Job, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that the tokenizer knows all tokens that the job's sampling parameters name, and supports the constraint.

    Args:
        job: The job.
        tokenizer: The tokenizer of the job's model.
        vocab_size: Number of token ids of the model.

    Raises:
        JobFileError: A token is unknown, or the constraint is unsupported.
    """
    check_followed(job, tokenizer)
    try:
        NamedTokens(tokenizer, vocab_size).add_tokens(job.params())
    except RowProblem as problem:
        name, _, message = problem.error.message.partition(": ")
        raise job.mistake(f"sampling.{name}", message) from None
