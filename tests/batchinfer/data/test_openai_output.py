"""`--to-openai`: the lines that OpenAI's batch API would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.data.completion_store import CompletionStore
from batchinfer.data.manifest import PublishSpec
from batchinfer.data.openai_output import CHAT, COMPLETIONS, index_endpoints, write_openai
from batchinfer.data.publisher import publish
from batchinfer.data.state import StateFolder
from batchinfer.errors import UsageError
from tests.batchinfer.data.small_index import (
    SmallIndex,
    answer,
    bad_row,
    decode,
    good_row,
    keys_in,
    write_index,
)


def published(folder: Path, rows: list[dict[str, Any]]) -> SmallIndex:
    index = write_index(folder / "x", rows)
    state = StateFolder(folder / "res")
    with state.lock(), CompletionStore(state.completions) as store:
        store.append(answer(key, 3) for key in keys_in(rows))
        store.commit()
        publish(index, store.parts(), PublishSpec("job", "1" * 64, (), 1), decode, state)
    return index


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_chat_and_errors(tmp_path: Path) -> None:
    published(tmp_path, [good_row(0, [1, 2], endpoint=CHAT), bad_row(1), good_row(2, [3], endpoint=CHAT)])
    out = tmp_path / "out.jsonl"
    assert write_openai(tmp_path / "res", out, model="tiny") == 3
    first, second, third = lines(out)
    assert first["custom_id"] == "id-0"
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert (second["response"], second["error"]["code"]) == (None, "bad_json")
    assert len({first["id"], second["id"], third["id"]}) == 3
    again = tmp_path / "again.jsonl"
    write_openai(tmp_path / "res", again, model="tiny")
    assert again.read_bytes() == out.read_bytes()


def test_mixed_endpoints_need_the_index(tmp_path: Path) -> None:
    rows = [good_row(0, [1], endpoint=CHAT), good_row(1, [2], endpoint=COMPLETIONS)]
    index = published(tmp_path, rows)
    out = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="needs the run's index"):
        write_openai(tmp_path / "res", out, model="tiny")
    write_openai(tmp_path / "res", out, model="tiny", endpoints=index_endpoints(index))
    first, second = (line["response"]["body"] for line in lines(out))
    assert "message" in first["choices"][0]
    assert second["choices"][0]["text"].count(" ") == 2
    assert second["object"] == "text_completion"


def test_other_inputs_are_refused(tmp_path: Path) -> None:
    published(tmp_path, [good_row(0, [1])])
    with pytest.raises(UsageError, match="no OpenAI batch file"):
        write_openai(tmp_path / "res", tmp_path / "out.jsonl", model="tiny")
    with pytest.raises(UsageError, match="no published result"):
        write_openai(tmp_path / "nowhere", tmp_path / "out.jsonl", model="tiny")
    assert not (tmp_path / "out.jsonl").exists()
