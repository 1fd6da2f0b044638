"""`--to-openai FILE`: a published result as the output file of an OpenAI batch.

It has one line per input row, in input order, with a choice per answer. `url` and `model` of a request are only in the
input, which is read again together with the result. Ids are derived from the row, and `created` is 0 unless a time is
given: equal results give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchinfer.core.errors import InputCorrupt, UsageError
from batchinfer.core.request import RowError
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.rebatch import parquet_batches
from batchinfer.input.openai import CHAT_URL, ECHO, VECTOR_URL
from batchinfer.input.reader import Reader
from batchinfer.input.rows import Values
from batchinfer.store.index.index import SAMPLE
from batchinfer.store.outputs.kind import OutputKind, TokenBytes
from batchinfer.store.outputs.openai_logprobs import with_prompt
from batchinfer.store.results.output_file import OutputFile
from batchinfer.store.results.published import open_published

LINE_BYTES = 400  # minimum bytes per line, for the check of free space
_COLUMNS = ("row_id", "custom_id", "status", "error_code", "error_message")
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RequestFields:
    """The fields of an OpenAI request that are needed for its line in the output file.

    Attributes:
        url: The endpoint of the request, or None if it is missing or unreadable.
        model: The requested model, or None.
        encoding: The requested `encoding_format` of a vector, or None.
        echoed: The prompt to repeat before the answer (`echo: true`), as text or token ids, or None.
    """

    url: str | None
    model: str | None
    encoding: str | None = None
    echoed: str | Sequence[int] | None = None


def read_request_fields(reader: Reader, limit: int | None = None) -> Iterator[RequestFields]:
    """Yield for each input row the fields of its OpenAI request that the output file needs, in order.

    Args:
        reader: Reads the input.
        limit: Maximum number of rows. None: all.

    Raises:
        InputCorrupt: A file has changed.
    """
    for batch in reader.batches(limit=limit):
        yield from (_request_fields(row) for row in batch.rows)


def _request_fields(row: Values | RowError) -> RequestFields:
    values: Values = {} if isinstance(row, RowError) else row
    body = values.get("body")
    named = body if isinstance(body, dict) else {}
    model, encoding = (_text(named.get(key)) for key in ("model", "encoding_format"))
    # Invalid values have made the row an error row
    echoed = named.get("prompt") if named.get(ECHO) is True else None
    return RequestFields(_text(values.get("url")), model, encoding, echoed)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def write_openai(
    result: Location,
    out: OutputFile,
    rows: Iterable[RequestFields],
    tokens: TokenBytes,
    kind: OutputKind,
    *,
    model: str,
    created: int = 0,
) -> int:
    """Write a result as the output file of an OpenAI batch, and return the number of lines.

    Args:
        result: The result folder.
        out: The output file.
        rows: The fields of each input row, in order.
        tokens: Converts token ids to bytes and texts.
        kind: The kind of answers.
        model: The model of answers to requests that name none.
        created: The Unix time to write as `created`. 0 gives equal bytes for equal results.

    Raises:
        UsageError: Nothing is published.
        InputCorrupt: The input has changed.
        OutputConflict: The file must not be replaced.
        StorageError: The file cannot be written.
    """
    found = open_published(result)
    if found is None:
        raise UsageError(f"{result}: no published result there")
    origin = Origin(found.manifest.job, model, created, tokens, kind)
    lines = 0
    with out.writing() as file:
        for text in _lines(found.files, iter(rows), origin):
            file.write(text.encode())
            lines += 1
    return lines


def _lines(files: Sequence[Path], rows: Iterator[RequestFields], origin: Origin) -> Iterator[str]:
    names = [name for file in files[:1] for name in pq.read_schema(file).names]
    own, size = origin.kind.openai_columns(names)
    own = [*own, *(name for name in (SAMPLE.name,) if name in names)]
    batches = parquet_batches(files, size or _BATCH_ROWS, [*_COLUMNS, *own])
    found = (row for batch in batches for row in batch.to_pylist())
    for _, answers in groupby(found, itemgetter("row_id")):
        request = next(rows, None)
        if request is None:
            raise InputCorrupt("the input has fewer rows than when it was read; run the job again")
        yield json.dumps(batch_line([*answers], request, origin), ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Origin:
    """The values that all lines of an OpenAI output file share.

    Attributes:
        job: The name of the job.
        model: The model of answers to requests that name none.
        created: The Unix time to write as `created`.
        tokens: Converts token ids to bytes and texts.
        kind: The kind of answers.
    """

    job: str
    model: str
    created: int
    tokens: TokenBytes
    kind: OutputKind


def batch_line(rows: Sequence[dict[str, Any]], request: RequestFields, origin: Origin) -> dict[str, Any]:
    """Return the line of an OpenAI output file for a request, as a JSON object.

    Its `response` has the answers, or is null if there are none. Its `error` is the first error, or null.

    Args:
        rows: The result rows of the request; several only with `n` or several inputs.
        request: The fields of the input row.
        origin: Values that all lines share.
    """
    first = rows[0]
    seed = f"{origin.job}\0{first['row_id']}\0{first['custom_id']}"
    answers = [row for row in rows if row["status"] != "error"]
    response: dict[str, Any] | None = None
    # A request for vectors must have a vector for each of its inputs
    if len(answers) == len(rows) or (answers and request.url != VECTOR_URL):
        body = _body(answers, request, origin, seed)
        response = {"status_code": 200, "request_id": _id("req_", seed), "body": body}
    what = "input" if request.url == VECTOR_URL else "choice"
    error = next((_error(row, len(rows), what) for row in rows if row["status"] == "error"), None)
    line = {"id": _id("batch_req_", seed), "custom_id": first["custom_id"]}
    return {**line, "response": response, "error": error}


def _error(row: dict[str, Any], rows: int, what: str) -> dict[str, Any]:
    which = f"{what} {row[SAMPLE.name]} of {rows}: " if rows > 1 else ""
    return {"code": row["error_code"], "message": f"{which}{row['error_message']}"}


def _body(
    answers: Sequence[dict[str, Any]], request: RequestFields, origin: Origin, seed: str
) -> dict[str, Any]:
    chat = request.url == CHAT_URL
    if request.echoed is not None and not chat:
        said = _echo(request.echoed, origin.tokens)
        answers = [
            with_prompt(row) | {"generated_text": said + (row["generated_text"] or "")} for row in answers
        ]
    found = origin.kind.openai_body(answers, chat, origin.tokens, request.encoding)
    if request.url == VECTOR_URL:
        return found | {"model": request.model or origin.model}
    named = {
        "id": _id("chatcmpl-" if chat else "cmpl-", seed),
        "object": found["object"],
        "created": origin.created,
        "model": request.model or origin.model,
    }
    return named | found


def _echo(prompt: str | Sequence[int], tokens: TokenBytes) -> str:
    return prompt if isinstance(prompt, str) else tokens.text_of(prompt)


def _id(prefix: str, seed: str) -> str:
    return prefix + hashlib.sha256((prefix + seed).encode()).hexdigest()[:24]
