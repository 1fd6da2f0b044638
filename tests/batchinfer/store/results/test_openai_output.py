"""`--to-openai` writes the lines of OpenAI's batch API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import InputCorrupt, UsageError
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.files import list_inputs
from batchinfer.input.reader import Reader
from batchinfer.store.outputs.registry import DEFAULT_KIND, KINDS
from batchinfer.store.results.openai import LINE_BYTES, RequestFields, read_request_fields, write_openai
from batchinfer.store.results.output_file import OutputFile, ProtectedFiles
from tests.batchinfer.store.small_index import (
    answer,
    bad_row,
    decode,
    good_row,
    keys_in,
    published,
    write_index,
)

CHAT = RequestFields("/v1/chat/completions", "gpt-4o-mini")
COMPLETIONS = RequestFields("/v1/completions", None)
UNREADABLE = RequestFields(None, None)


def result_of(folder: Path, rows: list[dict[str, Any]]) -> Location:
    published(folder, write_index(folder / "x", rows), (answer(key, 3) for key in keys_in(rows)))
    return Location.at(folder / "res")


def write(result: Location, path: Path, *requests: RequestFields, created: int = 0) -> int:
    """Write the lines of a result, given the requests of its rows."""
    state = StateFolder(path.parent / "res")
    out = OutputFile(Location.at(path), "--to-openai", ProtectedFiles((), (), (), ()), state)
    return write_openai(result, out, requests, decode, KINDS[DEFAULT_KIND], model="tiny", created=created)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_lines_have_the_shape_of_the_batch_api(tmp_path: Path) -> None:
    """Keys and constants follow the examples of OpenAI's API reference: batch output, chat and text completion."""
    result = result_of(tmp_path, [good_row(0, [1, 2]), bad_row(1), good_row(2, [3])])
    out = tmp_path / "out.jsonl"
    assert write(result, out, CHAT, UNREADABLE, COMPLETIONS) == 3
    chat, bad, text = lines(out)
    for line in (chat, bad, text):
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_")
    for line in (chat, text):
        assert line["response"].keys() == {"status_code", "request_id", "body"}
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["request_id"].startswith("req_")
    assert chat["response"]["body"] == {
        "id": chat["response"]["body"]["id"],
        "object": "chat.completion",
        "created": 0,
        "model": "gpt-4o-mini",
        "choices": [{"index": 0, "message": {"role": "assistant",
            "content": chat["response"]["body"]["choices"][0]["message"]["content"], "refusal": None},
            "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        "system_fingerprint": None,
    }  # fmt: skip
    assert chat["response"]["body"]["id"].startswith("chatcmpl-")
    body = text["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    assert (bad["custom_id"], bad["response"]) == (None, None)
    assert bad["error"] == {"code": "bad_json", "message": "not JSON"}
    assert [chat["custom_id"], text["custom_id"]] == ["id-0", "id-2"]


def test_the_space_check_never_overestimates_a_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write(result_of(tmp_path, [good_row(0, [1])]), out, COMPLETIONS)
    assert len(out.read_bytes()) - len(lines(out)[0]["response"]["body"]["choices"][0]["text"]) >= LINE_BYTES


def test_equal_results_give_equal_bytes_unless_a_time_is_set(tmp_path: Path) -> None:
    result = result_of(tmp_path, [good_row(0, [1, 2]), good_row(1, [3])])
    for name, created in (("a", 0), ("b", 0), ("c", 1711475054)):
        write(result, tmp_path / name, CHAT, CHAT, created=created)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [line["response"]["body"]["created"] for line in lines(tmp_path / "c")] == [1711475054] * 2


def test_requests_are_read_from_the_input(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"model": "m"}},
        {"custom_id": "b", "url": 3, "body": "no"},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{no json\n")
    reader = Reader.open(list_inputs(str(path), tmp_path, "openai"))
    wanted = [RequestFields("/v1/chat/completions", "m"), UNREADABLE, UNREADABLE]
    assert list(read_request_fields(reader)) == wanted
    assert list(read_request_fields(reader, limit=1)) == wanted[:1]


def test_a_file_that_cannot_be_completed_does_not_appear(tmp_path: Path) -> None:
    result = result_of(tmp_path, [good_row(0, [1]), good_row(1, [2])])
    with pytest.raises(InputCorrupt, match="fewer rows"):
        write(result, tmp_path / "out.jsonl", CHAT)
    with pytest.raises(UsageError, match="no published result"):
        write(Location.at(tmp_path / "nowhere"), tmp_path / "out.jsonl", CHAT)
    assert not (tmp_path / "out.jsonl").exists()
    assert not list(tmp_path.glob(".batchinfer-*.tmp"))
