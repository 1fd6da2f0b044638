"""`--to-openai FILE`: a published result as the output file of an OpenAI batch.

One line per input row, in input order. Ids are derived from the row, `created` is 0: equal results give
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchinfer.data.durable import DurableFile, FileOps
from batchinfer.data.manifest import Manifest, read_manifest
from batchinfer.data.rebatch import parquet_batches
from batchinfer.data.result_rows import IndexView
from batchinfer.errors import UsageError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_COLUMNS = [
    "row_id",
    "custom_id",
    "status",
    "generated_text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "error_code",
    "error_message",
]


def index_endpoints(index: IndexView) -> Iterator[str | None]:
    """The endpoint of every row of an index, in order."""
    for batch in parquet_batches(index.index_parts, 4096):
        yield from batch.column("endpoint").to_pylist()


def refuse_other_input(index: IndexView) -> None:
    """Raises UsageError before anything is computed when the input is no OpenAI batch file."""
    if any("endpoint" not in pq.read_schema(part).names for part in index.index_parts[:1]):
        raise UsageError(
            "--to-openai: the input is no OpenAI batch file, which it needs; leave the option out"
        )


def write_openai(
    result: Path,
    out: Path,
    *,
    model: str,
    endpoints: Iterable[str | None] | None = None,
    ops: FileOps | None = None,
) -> int:
    """Write the batch output file `out` durably; the number of lines.

    `model` is the name to put into every answer. `endpoints` has one entry per row; without it the manifest
    must name a single one. Raises UsageError when the result did not come from a batch file, or that is not
    known.
    """
    manifest = read_manifest(result)
    if manifest is None:
        raise UsageError(f"{result}: no published result there")
    per_row = iter(endpoints) if endpoints is not None else repeat(_only_endpoint(result, manifest))
    file = DurableFile(out, ops or FileOps())
    try:
        lines = _write_lines(file, result, manifest, model, per_row)
    except BaseException:
        file.abandon()
        raise
    file.commit()
    return lines


def _only_endpoint(result: Path, manifest: Manifest) -> str:
    if len(manifest.endpoints) == 1:
        return manifest.endpoints[0]
    if manifest.endpoints:
        raise UsageError(
            f"{result}: rows of {' and '.join(manifest.endpoints)}: --to-openai needs the run's index"
        )
    raise UsageError(f"{result}: its input was no OpenAI batch file, which --to-openai needs")


def _write_lines(
    file: DurableFile, result: Path, manifest: Manifest, model: str, endpoints: Iterator[str | None]
) -> int:
    lines = 0
    for batch in parquet_batches([result / item.name for item in manifest.files], 1024):
        rows = batch.select(_COLUMNS).to_pylist()
        text = "".join(
            json.dumps(batch_line(row, next(endpoints), model, manifest.job), ensure_ascii=False) + "\n"
            for row in rows
        )
        file.write(text.encode())
        lines += len(rows)
    return lines


def batch_line(row: dict[str, Any], endpoint: str | None, model: str, job: str) -> dict[str, Any]:
    """One line: `response` for an answer, `error` for an error row, the other one null."""
    seed = f"{job}\0{row['row_id']}\0{row['custom_id']}"
    line: dict[str, Any] = {"id": _id("batch_req_", seed), "custom_id": row["custom_id"]}
    if row["status"] == "error":
        error = {"code": row["error_code"], "message": row["error_message"]}
        return {**line, "response": None, "error": error}
    body = _body(row, endpoint == CHAT, model, seed)
    response = {"status_code": 200, "request_id": _id("req_", seed), "body": body}
    return {**line, "response": response, "error": None}


def _body(row: dict[str, Any], chat: bool, model: str, seed: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": row["finish_reason"]}
    if chat:
        choice["message"] = {"role": "assistant", "content": row["generated_text"], "refusal": None}
    else:
        choice["text"] = row["generated_text"]
    prompt, output = row["prompt_tokens"], row["completion_tokens"]
    return {
        "id": _id("chatcmpl-" if chat else "cmpl-", seed),
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def _id(prefix: str, seed: str) -> str:
    return prefix + hashlib.sha256((prefix + seed).encode()).hexdigest()[:24]
