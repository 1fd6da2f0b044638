"""Answers that are texts: token ids, and log-probabilities if rows request them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.reasoning import ReasoningTokens
from batchinfer.core.request import Completion, Output, Request, Tokens
from batchinfer.core.sampling import JSON_CONSTRAINTS
from batchinfer.input.constraints.generated_schema import parsed_schema
from batchinfer.store.columns.answer_check import AnswerCheck, parse_answer
from batchinfer.store.columns.confidence_column import AnswerTokens, confidence_array, confidence_field
from batchinfer.store.columns.logprob_column import (
    COLUMN,
    LOGPROBS_FIELD,
    Detokenizer,
    logprob_column,
    logprob_entries,
)
from batchinfer.store.columns.prompt_logprob_column import (
    PROMPT_COLUMN,
    PROMPT_LOGPROBS_FIELD,
    prompt_logprob_column,
)
from batchinfer.store.columns.schema_columns import SchemaColumns, schema_columns
from batchinfer.store.index.index import SAMPLE
from batchinfer.store.index.requested import AnswerSchema, RequestedOutputs
from batchinfer.store.outputs.answer_texts import AnswerReader
from batchinfer.store.outputs.call_column import CALLS_FIELD, openai_calls
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.kind import OutputKind, Receiver, TokenBytes
from batchinfer.store.outputs.openai_logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from batchinfer.store.outputs.reasoning_columns import REASONING_FIELDS
from batchinfer.store.outputs.stored_logprobs import (
    LOGPROB_SCHEMA,
    PROMPT_SCHEMA,
    logprob_columns,
    prompt_columns,
)

RESULT_SCHEMA = frame_schema(
    pa.field("generated_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("completion_tokens", pa.int32()),
)
# Result rows, and lines of OpenAI files, per batch with log-probabilities: with 20 alternatives, 128 rows of 1,000
# tokens take 60 MB, and 16 rows as JSON take 150 MB
LOGPROB_ROWS, _LOGPROB_LINES = 128, 16
# Errors of answers that were generated. Their text is kept, since it says more than the message
TEXT_IS_KEPT = ("incomplete_output", "unfit_output", "constraint_failed")
_CODES_WITH_TEXT = pa.array(TEXT_IS_KEPT)
_OPENAI = ("generated_text", "finish_reason", "prompt_tokens", "completion_tokens")
_REASONING = tuple(field.name for field in REASONING_FIELDS)


class TokensKind(OutputKind):
    """Answers that are texts, the base of `TextsAndVectorsKind`. `OutputKind` documents the methods."""

    name, version, output, answer = "tokens", 0, Tokens, "generated_text"
    stored = pa.schema([*LOGPROB_SCHEMA, *PROMPT_SCHEMA])

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return a receiver, which replaces invalid JSON answers by errors before they are stored.

        Args:
            columns: The result columns for the fields of JSON answers. None: answers have no such columns.
            detokenizer: Converts tokens to text.
        """
        return JsonAnswers(AnswerCheck(columns, detokenizer))

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the columns of the store for log-probabilities of texts, by name. Empty without any.

        Token ids are in COMPLETION_SCHEMA, which all answers have.
        """
        texts = [one if isinstance(one, Tokens) else None for one in outputs]
        found = [None if one is None else one.logprobs for one in texts]
        prompts = [None if one is None else one.prompt for one in texts]
        arrays: dict[str, pa.Array] = {}
        if any(one is not None for one in found):
            arrays |= zip(LOGPROB_SCHEMA.names, logprob_columns(found), strict=True)
        if any(one is not None for one in prompts):
            arrays |= zip(PROMPT_SCHEMA.names, prompt_columns(prompts), strict=True)
        return arrays

    def read(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of the store that a result needs: log-probabilities of answers and prompts."""
        of_answers = LOGPROB_SCHEMA if _has_logprobs(requested) else ()
        return pa.schema([*of_answers, *(PROMPT_SCHEMA if requested.prompt_logprobs else ())])

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return the number of result rows to write at a time: 128 with log-probabilities, else None."""
        return LOGPROB_ROWS if _has_logprobs(requested) or requested.prompt_logprobs else None

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result, without the columns that are copied from the input.

        The text and its number of tokens come first. Then come the columns that the job requests: reasoning,
        tool calls, log-probabilities, confidence, and fields of JSON answers.
        """
        ours = (
            RESULT_SCHEMA if requested.reasoning is None else pa.schema([*RESULT_SCHEMA, *REASONING_FIELDS])
        )
        ours = ours if requested.tool_calls is None else ours.append(CALLS_FIELD)
        ours = ours if requested.logprobs is None else ours.append(LOGPROBS_FIELD)
        ours = ours.append(PROMPT_LOGPROBS_FIELD) if requested.prompt_logprobs else ours
        ours = ours if requested.confidence is None else ours.append(confidence_field(requested.confidence))
        columns = _answer_columns(requested.answers)
        return ours if columns is None else pa.schema([*ours, *columns.schema])

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with texts. `OutputKind.table` documents the arguments."""
        frame = Frame(rows, matched)
        told = self._have_texts(frame)
        reader = AnswerReader(requested.reasoning, requested.tool_calls, detokenizer)
        texts = reader.texts(rows, matched, frame, told.to_numpy())
        table = frame.result_table(
            generated_text=texts.generated,
            finish_reason=_where(told, frame.when_answered(matched.column("finish_reason"))),
            prompt_tokens=rows.column("token_count"),
            completion_tokens=_where(
                told, frame.when_answered(pc.list_value_length(matched.column("token_ids")))
            ),
        ).cast(RESULT_SCHEMA)
        for field, array in zip(REASONING_FIELDS, texts.reasoning, strict=False):
            table = table.append_column(field, array)
        if texts.calls is not None:
            table = table.append_column(CALLS_FIELD, texts.calls)
        if requested.logprobs is not None:
            found = logprob_column(matched, frame.answered.to_numpy(), detokenizer)
            table = table.append_column(LOGPROBS_FIELD, found)
        if requested.prompt_logprobs:
            found = prompt_logprob_column(matched, frame.answered.to_numpy(), detokenizer)
            table = table.append_column(PROMPT_LOGPROBS_FIELD, found)
        if requested.confidence is not None:
            answers = _with_tokens(table, matched, detokenizer)
            schema = None if requested.answers is None else parsed_schema(requested.answers.text)
            found = confidence_array(answers, requested.confidence, schema)
            table = table.append_column(confidence_field(requested.confidence), found)
        columns = _answer_columns(requested.answers)
        return table if columns is None else _with_answers(table, columns)

    def _have_texts(self, frame: Frame) -> pa.ChunkedArray:
        # The text of some errors is kept
        return pc.or_(frame.answered, pc.is_in(frame.matched.column("error_code"), _CODES_WITH_TEXT))

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the number of log-probabilities in each row of a result table, with shape [rows].

        Answers and prompts count.
        """
        return logprob_entries(table) + logprob_entries(table, PROMPT_COLUMN)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Return the columns that an OpenAI file needs, and how many rows to read at a time (None: default).

        Args:
            names: The columns of the result.
        """
        ours = [*_OPENAI, *(name for name in (*_REASONING, CALLS_FIELD.name) if name in names)]
        large = [name for name in (COLUMN, PROMPT_COLUMN) if name in names]
        return [*ours, *large], _LOGPROB_LINES if large else None

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        """Return the body of a response: a completion with a choice for each result row in `answers`.

        `OutputKind.openai_body` documents the arguments.
        """
        body = {
            "object": "chat.completion" if chat else "text_completion",
            "choices": [_choice(row, chat, tokens) for row in answers],
            "usage": _usage(answers),
            "system_fingerprint": None,
        }
        requested = answers[0].get(PROMPT_COLUMN) if chat else None
        return body if requested is None else {**body, PROMPT_COLUMN: prompt_logprobs(requested)}


class JsonAnswers:
    """Checks the answers of a run, and replaces invalid JSON answers and invalid tool calls by errors."""

    def __init__(self, check: AnswerCheck) -> None:
        self._check = check
        # Keys of running requests with JSON answers or tool calls, with the reasoning marks that may precede them
        self._of_json: dict[bytes, ReasoningTokens | None] = {}
        self._calling = set[bytes]()  # keys of running requests with tool calls

    def expect(self, requests: Iterable[Request]) -> None:
        """Register requests that are about to run. Their answers will be passed to `receive`."""
        for one in requests:
            if one.params.constraint in (*JSON_CONSTRAINTS, "tool_call"):
                self._of_json[one.key] = one.params.reasoning
            if one.params.constraint == "tool_call":
                self._calling.add(one.key)

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions to store. Invalid JSON answers are replaced by errors."""
        of_json = [one for one in completions if one.key in self._of_json]
        found = ((one.key, self._of_json.pop(one.key)) for one in of_json)
        marks = {key: reasoning for key, reasoning in found if reasoning is not None}
        found_now = self._check.check_all(of_json, marks, self._calling) if of_json else []
        checked = {one.key: one for one in found_now}
        self._calling -= checked.keys()
        return [checked.get(one.key, one) for one in completions]


def _where(told: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(told, values, pa.scalar(None, values.type))


def _has_logprobs(requested: RequestedOutputs) -> bool:
    return requested.logprobs is not None or requested.confidence is not None


def _with_tokens(
    table: pa.Table, matched: pa.Table, detokenizer: Detokenizer
) -> Iterator[AnswerTokens | None]:
    # None for an error row, and for an answer that did not end with a stop token or string
    columns = (table.column("finish_reason"), table.column("generated_text"))
    kept = (matched.column(name) for name in ("token_ids", "logprobs"))
    for reason, text, ids, logprobs in zip(*(one.to_pylist() for one in (*columns, *kept)), strict=True):
        whole = reason == "stop" and text is not None and logprobs is not None
        yield AnswerTokens.of(text, ids, logprobs, detokenizer) if whole else None


def _answer_columns(answers: AnswerSchema | None) -> SchemaColumns | None:
    return None if answers is None else schema_columns(parsed_schema(answers.text), answers.column)


def _with_answers(table: pa.Table, columns: SchemaColumns) -> pa.Table:
    whole = pc.equal(table.column("status"), "ok").to_numpy(zero_copy_only=False)
    texts = table.column("generated_text").to_pylist()
    answers = [
        parse_answer(text) if ok and text is not None else None for text, ok in zip(texts, whole, strict=True)
    ]
    for field, array in zip(columns.schema, columns.arrays(answers), strict=True):
        table = table.append_column(field, array)
    return table


def _usage(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    # The prompt counts once
    prompt, output = answers[0]["prompt_tokens"], sum(row["completion_tokens"] for row in answers)
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if "reasoning_tokens" not in answers[0]:
        return usage
    reasoned = sum(row["reasoning_tokens"] for row in answers)
    return {**usage, "completion_tokens_details": {"reasoning_tokens": reasoned}}


def _choice(row: dict[str, Any], chat: bool, tokens: TokenBytes) -> dict[str, Any]:
    logprobs = (chat_logprobs if chat else text_logprobs)(row.get(COLUMN), tokens)
    reason = row["finish_reason"]
    calls = openai_calls(row.get(CALLS_FIELD.name)) if chat else []
    reason = "length" if reason == "repetition" else "tool_calls" if calls and reason == "stop" else reason
    end, number = {"logprobs": logprobs, "finish_reason": reason}, row.get(SAMPLE.name, 0)
    if chat:
        return {"index": number, "message": _message(row, calls), **end}
    of_prompt = row.get(PROMPT_COLUMN)
    more = {} if of_prompt is None else {PROMPT_COLUMN: prompt_logprobs(of_prompt)}
    return {"index": number, "text": row["generated_text"] or "", **end, **more}


def _message(row: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    message = {"role": "assistant", "content": row["generated_text"], "refusal": None}
    if "reasoning" in row:
        message["reasoning_content"] = row["reasoning"]
    return {**message, "tool_calls": calls} if calls else message
