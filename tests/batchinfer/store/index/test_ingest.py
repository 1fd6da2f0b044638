"""Ingest: every input row becomes one index row, and a complete index is reused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import InputCorrupt, JobFileError, StorageError, Unavailable
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts import render_worker
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.store.index.index import INDEX_FORMAT, Index
from batchinfer.store.index.ingest import IngestProgress, ingest
from tests.batchinfer.store.index.ingest_kit import (
    carried,
    checkpoint,
    make_job,
    options,
    prompts_of,
    rows_of,
    run,
    write_lines,
)
from tests.batchinfer.wrong_jobs import environment
from tests.patience import PATIENCE_S
from tests.speed.ingest import measure

USER = {"user": "{{ text }}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    return tmp_path


def ingest_rows(folder: Path, rows: list[Any], prompt: dict[str, Any] | None = None, **kind: Any) -> Index:
    path = write_lines(folder / "rows.jsonl", rows)
    changes = {
        name: kind.pop(name) for name in ("max_model_len", "row_timeout_s", "vocab_size") if name in kind
    }
    openai = kind.get("format") == "openai"
    return run(make_job(folder, prompt=None if openai else prompt or USER, path=str(path), **kind), **changes)


def codes(index: Index) -> list[str | None]:
    return [row["error_code"] for row in rows_of(index)]


def texts(folder: Path, index: Index) -> list[str | None]:
    rust = Tokenizer.load(folder / "model").rust
    return [None if p is None else rust.decode(p, skip_special_tokens=False) for p in prompts_of(index)]


def test_rows_in_order_with_tokens_and_keys(folder: Path) -> None:
    index = ingest_rows(folder, [{"text": f"row {n}", "n": n} for n in range(1300)], id="n", limit=1200)
    rows = rows_of(index)
    assert [r["row_id"] for r in rows] == [r["row_index"] for r in rows] == list(range(1200))
    assert [r["custom_id"] for r in rows] == [str(n) for n in range(1200)]
    assert texts(folder, index)[7] == "<|im_start|>user\nrow 7<|im_end|>\n<|im_start|>assistant\n"
    assert len({r["key"] for r in rows}) == 1200
    assert {len(r["key"]) for r in rows} == {32}
    assert index.rows == 1200
    assert index.total_tokens == sum(r["token_count"] for r in rows) == len(index.tokens)
    assert {r["expected_tokens"] for r in rows} == {256}
    assert SamplingParams.from_json(rows[0]["params"]) == SamplingParams()


BAD_ROWS: list[tuple[str, dict[str, Any] | None, Any, str]] = [
    ("missing column", USER, {"other": 1}, "template_error"),
    ("null", USER, {"text": None}, "null_in_template"),
    ("template raises", {"user": "{{ 1 // text }}"}, {"text": 0}, "template_error"),
    ("memory", {"user": "{{ text }}{{ 'a' * 10**10 }}"}, {"text": "x"}, "template_memory"),
    ("rendered too long", {"user": "{{ text * 5000000 }}"}, {"text": "x"}, "text_too_long"),
    ("too long", USER, {"text": "漢" * 600}, "prompt_too_long"),
    ("max_tokens", USER, {"text": "x", "max_tokens": 0}, "bad_parameter"),
    ("max_tokens type", USER, {"text": "x", "max_tokens": "9"}, "bad_parameter"),
    ("temperature", USER, {"text": "x", "temperature": -0.1}, "bad_parameter"),
    ("top_p", USER, {"text": "x", "top_p": 1.1}, "bad_parameter"),
    ("top_p zero", USER, {"text": "x", "top_p": 0}, "bad_parameter"),
    ("min_tokens", USER, {"text": "x", "min_tokens": 300}, "bad_parameter"),
    ("stops", USER, {"text": "x", "stop": ["s"] * 17}, "too_many_stops"),
    ("stop empty", USER, {"text": "x", "stop": [""]}, "bad_parameter"),
    ("stop type", USER, {"text": "x", "stop": 7}, "bad_parameter"),
    ("logprobs", USER, {"text": "x", "logprobs": 21}, "bad_parameter"),
    ("logprobs below zero", USER, {"text": "x", "logprobs": -1}, "bad_parameter"),
    ("logprobs type", USER, {"text": "x", "logprobs": True}, "bad_parameter"),
    ("logprobs part", USER, {"text": "x", "logprobs": 1.5}, "bad_parameter"),
    ("no messages", {"messages": "m"}, {"m": []}, "empty_messages"),
    ("null messages", {"messages": "m"}, {"m": None}, "prompt_missing"),
    ("messages type", {"messages": "m"}, {"m": "hi"}, "prompt_type"),
    ("message type", {"messages": "m"}, {"m": ["hi"]}, "prompt_type"),
    ("content type", {"messages": "m"}, {"m": [{"role": "user", "content": 3}]}, "prompt_type"),
    ("role", {"messages": "m"}, {"m": [{"role": "robot", "content": "x"}]}, "unknown_role"),
    ("role type", {"messages": "m"}, {"m": [{"role": ["user"], "content": "x"}]}, "unknown_role"),
    ("image", {"messages": "m"}, {"m": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "unsupported_content"),
    ("null text", {"text": "t"}, {"t": None}, "prompt_missing"),
    ("text type", {"text": "t"}, {"t": ["x"]}, "prompt_type"),
    ("empty text", {"text": "t"}, {"t": ""}, "empty_prompt"),
    ("empty ids", {"token_ids": "ids"}, {"ids": []}, "empty_prompt"),
    ("ids type", {"token_ids": "ids"}, {"ids": "12"}, "prompt_type"),
    ("id type", {"token_ids": "ids"}, {"ids": [1, "2"]}, "prompt_type"),
    ("id too large", {"token_ids": "ids"}, {"ids": [1, 1000]}, "token_id_out_of_range"),
    ("id huge", {"token_ids": "ids"}, {"ids": [10**30]}, "token_id_out_of_range"),
    ("id negative", {"token_ids": "ids"}, {"ids": [-1]}, "token_id_out_of_range"),
]  # fmt: skip


PARAMETERS = ("max_tokens", "min_tokens", "temperature", "top_p", "stop", "logprobs")
GOOD_ROW = {"text": 1, "m": [{"role": "user", "content": "hi"}], "t": "hi", "ids": [1]}
PROMPTS = list(dict.fromkeys(json.dumps(b[1]) for b in BAD_ROWS))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_bad_row_is_an_error_row(folder: Path, prompt: str) -> None:
    cases = [b for b in BAD_ROWS if json.dumps(b[1]) == prompt]
    own = {"from_columns": PARAMETERS} if json.loads(prompt) == USER else {}
    index = ingest_rows(
        folder, [*(row for _, _, row, _ in cases), GOOD_ROW], json.loads(prompt), sampling=own
    )
    rows = rows_of(index)
    for row, (name, _, _, code) in zip(rows, cases, strict=False):
        assert row["error_code"] == code, name
        assert row["key"] is None
        assert row["token_count"] is None
        assert len(row["error_message"].encode()) <= 2048
        assert row["retryable"] is False
    always = cases[0][3] == "template_memory"
    assert (rows[-1]["error_code"] is None) is not always
    assert index.error_rows == len(cases) + always


def test_the_error_of_an_image_names_the_unsupported_part(folder: Path) -> None:
    """A part of an unknown type may contain anything and is not quoted."""
    parts = ({"type": "image_url", "image_url": "x"}, {"type": "my prompt"}, {"type": "text", "text": 3})
    rows = [{"m": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]} for part in parts]
    told = [row["error_message"] for row in rows_of(ingest_rows(folder, rows, {"messages": "m"}))]
    plain = "messages[0].content: only parts of type text are read"
    assert told == [f"{plain}; this is one of type image_url", plain, plain]


def request(body: dict[str, Any], url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": body, **more}


CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BAD_REQUESTS: list[tuple[Any, str]] = [
    (request({**CHAT, "n": 1025}), "n_over_limit"),
    (request({**CHAT, "n": 0}), "bad_parameter"),
    (request({**CHAT, "n": True}), "bad_parameter"),
    (request({**CHAT, "n": 1.5}), "bad_parameter"),
    (request({**CHAT, "n": 2, "temperature": 0}), "bad_parameter"),
    (request({**CHAT, "stream": True}), "stream"),
    (request({**CHAT, "frobnicate": 1}), "unknown_field"),
    (request({**CHAT, "tools": [{"type": "function"}]}), "bad_parameter"),
    (request({**CHAT, "logprobs": 3}), "bad_parameter"),
    (request({**CHAT, "logprobs": True, "top_logprobs": 21}), "bad_parameter"),
    (request({**CHAT, "top_logprobs": 2}), "bad_parameter"),
    (request({**CHAT, "logprobs": False, "top_logprobs": 2}), "bad_parameter"),
    (request({"prompt": "ab", "logprobs": True}, "/v1/completions"), "bad_parameter"),
    (request({"prompt": "ab", "logprobs": 21}, "/v1/completions"), "bad_parameter"),
    (request({"prompt": "ab", "logprobs": 1, "top_logprobs": 1}, "/v1/completions"), "unknown_field"),
    (request(CHAT, extra=1), "unknown_field"),
    (request({**CHAT, "max_tokens": -1}), "bad_parameter"),
    (request({"model": "m"}), "prompt_missing"),
    (request({"prompt": None}, "/v1/completions"), "prompt_missing"),
    (request(CHAT, "/v1/embeddings"), "bad_request"),
    (request(CHAT) | {"method": "GET"}, "bad_request"),
    (request(CHAT) | {"body": "x"}, "bad_request"),
    ({"custom_id": "c"}, "bad_request"),
]


def test_openai_requests(folder: Path) -> None:
    good = [
        request({**CHAT, "max_completion_tokens": 9, "temperature": 0.5, "stop": "x", "n": 1, "user": "u",
            "seed": None}),
        request({"prompt": "ab", "max_tokens": 3}, "/v1/completions"),
        request({"prompt": [5, 6]}, "/v1/completions"),
        request({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": False}),
    ]  # fmt: skip
    index = ingest_rows(folder, good + [row for row, _ in BAD_REQUESTS], format="openai")
    rows = rows_of(index)
    assert codes(index) == [None] * 4 + [code for _, code in BAD_REQUESTS]
    params = SamplingParams.from_json(rows[0]["params"])
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, ("x",))
    assert prompts_of(index)[0] == prompts_of(index)[3]
    assert prompts_of(index)[2] == [5, 6]
    assert rows[1]["endpoint"] == "/v1/completions"
    assert {r["custom_id"] for r in rows} == {"c"}


@pytest.mark.parametrize(("job", "asked"), [
    ({}, [None, None, None, 0, 4, 20, None, None, 0, 5]),
    ({"logprobs": 2}, [2, None, None, 0, 4, 20, 2, None, 0, 5]),
])  # fmt: skip
def test_openai_requests_ask_for_logprobs_as_its_api_has_it(
    folder: Path, job: dict[str, Any], asked: list[int | None]
) -> None:
    """A chat with logprobs: true and top_logprobs, a text completion with a number."""
    chats = [{}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": True}]
    chats += [{"logprobs": True, "top_logprobs": most} for most in (4, 20)]
    texts = [{}, {"logprobs": False}, {"logprobs": 0}, {"logprobs": 5}]
    rows = [request({**CHAT, **own}) for own in chats]
    rows += [request({"prompt": "ab", **own}, "/v1/completions") for own in texts]
    index = ingest_rows(folder, rows, format="openai", sampling=job)
    assert [SamplingParams.from_json(row["params"]).logprobs for row in rows_of(index)] == asked
    assert index.logprobs == Index.open(index.folder).logprobs == 20
    quiet = ingest_rows(folder, rows[:3], format="openai", sampling=job)
    assert quiet.logprobs == job.get("logprobs")


def test_log_probabilities_change_the_work_key(folder: Path) -> None:
    rows = [{"text": "x", "lp": lp} for lp in (None, 0, 3, 3, None)]
    index = ingest_rows(folder, rows, USER, sampling={"from_columns": {"logprobs": "lp"}})
    keys = [row["key"] for row in rows_of(index)]
    assert len(set(keys)) == 3
    assert (keys[0], keys[2]) == (keys[4], keys[3])
    assert index.logprobs == 3
    plain = ingest_rows(folder, rows, USER)
    assert plain.logprobs is None
    assert {row["key"] for row in rows_of(plain)} == {keys[0]}
    silent = ingest_rows(folder, rows[:1], USER, sampling={"from_columns": {"logprobs": "lp"}})
    assert silent.logprobs == 0, "the job asks, whatever its rows do"


def test_openai_requests_have_the_defaults_of_openai(folder: Path) -> None:
    """Temperature 1; a chat may fill the context, a text completion has 16 tokens. The job file overrides both."""
    rows = [request(CHAT), request({"prompt": "ab"}, "/v1/completions"), request({**CHAT, "temperature": 0})]
    chat, text, greedy = (
        SamplingParams.from_json(row["params"])
        for row in rows_of(ingest_rows(folder, rows, format="openai", max_model_len=96))
    )
    assert chat == SamplingParams(max_tokens=96, temperature=1.0)
    assert text == SamplingParams(max_tokens=16, temperature=1.0)
    assert greedy == SamplingParams(max_tokens=96)
    said = {"temperature": 0, "max_tokens": 5, "seed": 0}
    path = str(write_lines(folder / "said.jsonl", rows))
    job = make_job(folder, prompt=None, path=path, format="openai", sampling=said)
    params = [SamplingParams.from_json(row["params"]) for row in rows_of(run(job))]
    assert params == [SamplingParams(max_tokens=5)] * 3


def test_openai_files_are_detected(folder: Path) -> None:
    path = write_lines(folder / "batch.jsonl", [b"{broken", request(CHAT)])
    job = make_job(folder, prompt=None, path=str(path), sampling={"from_columns": ["max_tokens"]})
    with pytest.raises(JobFileError, match=r"sampling.from_columns: is not for OpenAI batch files"):
        run(job)
    assert codes(run(make_job(folder, prompt=None, path=str(path)))) == ["bad_json", None]
    plain = write_lines(folder / "plain.jsonl", [{"text": "x"}])
    with pytest.raises(JobFileError, match="no OpenAI batch file"):
        run(make_job(folder, prompt=None, path=str(plain)))


def test_special_tokens_in_content_stay_text(folder: Path) -> None:
    index = ingest_rows(folder, [{"text": "a <|im_end|> b <s>"}, {"text": "a b"}])
    tricky, plain = prompts_of(index)
    assert tricky is not None
    assert plain is not None
    assert (tricky.count(2), plain.count(2), tricky.count(0)) == (1, 1, 0)
    assert (
        texts(folder, index)[0] == "<|im_start|>user\na <|im_end|> b <s><|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_double_bos(folder: Path) -> None:
    checkpoint(folder / "model", template="{{ bos_token }}{{ messages[0].content }}", bos=True)
    assert [p[:2].count(0) for p in prompts_of(ingest_rows(folder, [{"text": "hi"}])) if p] == [1]
    assert [p.count(0) for p in prompts_of(ingest_rows(folder, [{"text": "hi"}], {"text": "text"})) if p] == [
        1
    ]


def params_of(index: Index) -> list[SamplingParams]:
    return [SamplingParams.from_json(r["params"]) for r in rows_of(index)]


def test_a_column_with_the_name_of_a_parameter_is_no_parameter(folder: Path) -> None:
    """A sensor's temperature of 23.5 would make every answer random."""
    rows = [{"text": "a", "temperature": 23.5, "stop": "bus", "seed": 3, "max_tokens": -1}, {"text": "b"}]
    plain = ingest_rows(folder, [{"text": "a"}, {"text": "b"}])
    index = ingest_rows(folder, rows)
    assert params_of(index) == [SamplingParams(), SamplingParams()]
    assert [r["key"] for r in rows_of(index)] == [r["key"] for r in rows_of(plain)]


def test_a_declared_column_overrides_the_job(folder: Path) -> None:
    """It may also be carried, the id, and used in the prompt. Null means the job's value."""
    rows = [{"text": "a", "most": 5, "seed": 3, "stop": "x"}, {"text": "b", "most": None}, {"text": "c"}]
    index = ingest_rows(
        folder,
        rows,
        {"user": "{{ text }}{{ seed | default('') }}"},
        columns=("seed",),
        id="seed",
        sampling={"temperature": 1.0, "from_columns": {"max_tokens": "most", "seed": "seed"}},
    )
    found = params_of(index)
    assert [p.max_tokens for p in found] == [5, 256, 256]
    assert [p.seed for p in found] == [3, 0, 0]
    assert {p.stop for p in found} == {()}
    assert carried(index)["seed"].to_pylist() == [3, None, None]
    assert "user\na3<" in str(texts(folder, index)[0])


def test_a_bad_value_names_the_parameter_and_its_column(folder: Path) -> None:
    rows = [{"text": "a", "warmth": "hot"}, {"text": "b", "warmth": 0.5}]
    index = ingest_rows(folder, rows, sampling={"from_columns": {"temperature": "warmth"}})
    assert codes(index) == ["bad_parameter", None]
    assert rows_of(index)[0]["error_message"].startswith("temperature (column warmth): must be a number")


def test_a_system_message_before_messages(folder: Path) -> None:
    rows = [{"m": [{"role": "user", "content": "hi"}], "who": "Ann"}]
    index = ingest_rows(folder, rows, {"messages": "m", "system": "You are {{ who }}."})
    assert str(texts(folder, index)[0]).startswith(
        "<|im_start|>system\nYou are Ann.<|im_end|>\n<|im_start|>user\nhi"
    )


@pytest.mark.parametrize(("side", "kept"), [("left", [4, 5, 6, 7]), ("right", [1, 2, 3, 4])])
def test_truncation_leaves_room_for_the_answer(folder: Path, side: str, kept: list[int]) -> None:
    rows = [{"t": [1, 2, 3, 4, 5, 6, 7]}, {"t": [9, 9]}]
    prompt = {"token_ids": "t", "truncate": side}
    index = ingest_rows(folder, rows, prompt, max_model_len=7, sampling={"max_tokens": 3})
    assert prompts_of(index) == [kept, [9, 9]]
    assert [r["expected_tokens"] for r in rows_of(index)] == [3, 3]
    index = ingest_rows(folder, rows[:1], prompt, max_model_len=7, sampling={"max_tokens": 7})
    assert codes(index) == ["prompt_too_long"], "one token was kept, and the model answered that"


def test_a_prompt_that_is_too_long_names_the_exceeded_limit(folder: Path) -> None:
    """The job's own limit, or the model's positions."""
    rows = [{"t": [1] * 9}, {"t": [2]}]
    index = ingest_rows(folder, rows, {"token_ids": "t"}, max_model_len=7)
    assert rows_of(index)[0]["error_message"] == (
        "the prompt has 9 tokens and needs room for one more; the model reads at most 7; shorten it, or set "
        "prompt.truncate to left or right to cut such prompts"
    )
    job = make_job(folder, prompt={"token_ids": "t", "truncate": "left"}, path=str(folder / "rows.jsonl"))
    job = job.model_copy(update={"model": job.model.model_copy(update={"max_model_len": 7})})
    said = rows_of(run(job, max_model_len=7))[0]["error_message"]
    assert said == (
        "max_tokens 256 leaves no room for a prompt; model.max_model_len of the job allows 7; lower max_tokens, or "
        "raise model.max_model_len"
    )


def test_equal_sampled_rows_get_different_keys(folder: Path) -> None:
    rows = [{"text": "a"}, {"text": "b"}, {"text": "a"}, {"text": "a", "temperature": 0}] * 2
    own = {"temperature": 0.7, "from_columns": ("temperature",)}
    index = ingest_rows(folder, rows, sampling=own)
    keys = [r["key"] for r in rows_of(index)]
    assert len(set(keys)) == 4 + 2 + 1
    assert keys[3] == keys[7]
    greedy = ingest_rows(folder, rows)
    assert len({r["key"] for r in rows_of(greedy)}) == 2
    alone = ingest_rows(folder, rows[:2], sampling={"temperature": 0.7})
    assert [r["key"] for r in rows_of(alone)] == keys[:2]


def test_unique_ids(folder: Path) -> None:
    rows = [{"text": "a", "id": i} for i in ("x", "y", "x", None, None, "x")]
    index = ingest_rows(folder, rows, id="id", unique_ids=True)
    assert codes(index) == [None, None, "duplicate_custom_id", None, None, "duplicate_custom_id"]
    assert index.error_rows == 2
    assert prompts_of(index)[2] is None


def test_json_columns_get_the_narrowest_exact_type(folder: Path) -> None:
    rows = [
        {"text": "a", "i": 1, "f": 1, "b": True, "s": "x", "m": 1, "big": 10**30, "o": {"k": [1]}, "n": None},
        b"{bad",
        {"text": "b", "i": -(2**62), "f": 0.5, "b": None, "s": '"q"', "m": '"a"', "big": 7, "o": []},
    ]
    columns = ("i", "f", "b", "s", "m", "big", "o", "n", "text")
    table = carried(ingest_rows(folder, rows, columns=columns)).drop(["row_id"])
    kinds = [str(t) for t in table.schema.types]
    assert kinds == ["int64", "double", "bool", "string", "string", "string", "string", "string", "string"]
    assert table.to_pydict() == {
        "i": [1, None, -(2**62)],
        "f": [1.0, None, 0.5],
        "b": [True, None, None],
        "s": ["x", None, '"q"'],
        "m": ["1", None, '"a"'],
        "big": [str(10**30), None, "7"],
        "o": ['{"k": [1]}', None, "[]"],
        "n": [None] * 3,
        "text": ["a", None, "b"],
    }


def test_parquet_columns_keep_their_types(folder: Path) -> None:
    table = pa.table(
        {
            "text": ["a", "b"],
            "when": [date(2026, 1, 2), None],
            "price": [Decimal("1.50"), Decimal("2.25")],
            "tags": [["x"], []],
            "kind": pa.array(["k", "l"]).dictionary_encode(),
        }
    )
    pq.write_table(table, folder / "rows.parquet")
    columns = ("when", "price", "tags", "kind")
    job = make_job(
        folder, prompt={"user": "{{ text }} {{ price }}"}, columns=columns, path=str(folder / "rows.parquet")
    )
    index = run(job)
    assert carried(index).drop(["row_id"]).to_pydict() == table.select(list(columns)).to_pydict()
    assert index.passthrough_schema.types == table.schema.types[1:]
    assert "a 1.50" in str(texts(folder, index)[0])


def test_a_dictionary_is_one_where_every_file_has_one(folder: Path) -> None:
    texts = pa.array(["k", None, "l"])
    ordered = pa.DictionaryArray.from_arrays(pa.array([1, None, 0], pa.int8()), ["l", "k"], ordered=True)
    numbers = pa.array([7, None, 8]).dictionary_encode()
    both = {
        "kind": texts.dictionary_encode(),
        "some": texts.dictionary_encode(),
        "rank": ordered,
        "n": numbers,
    }
    (folder / "in").mkdir()
    pq.write_table(pa.table({"text": ["a", "b", "c"], **both}), folder / "in" / "1.parquet")
    pq.write_table(pa.table({"text": ["d", "e", "f"], **both, "some": texts}), folder / "in" / "2.parquet")
    job = make_job(folder, prompt={"user": "{{ text }}"}, columns=tuple(both), path=str(folder / "in"))
    index = run(job)
    dictionary = pa.dictionary(pa.int32(), pa.string())
    assert index.passthrough_schema.types == [dictionary, pa.string(), dictionary, pa.int64()]
    assert carried(index).drop(["row_id"]).to_pydict() == {
        "kind": ["k", None, "l"] * 2,
        "some": ["k", None, "l"] * 2,
        "rank": ["k", None, "l"] * 2,
        "n": [7, None, 8] * 2,
    }


def test_sql_input(folder: Path) -> None:
    write_lines(folder / "x.jsonl", [{"body": "b", "n": n} for n in range(50)])
    job = make_job(
        folder,
        prompt={"user": "{{ body }} {{ n }}"},
        columns=("n",),
        sql="from 'x.jsonl' order by n desc",
        limit=3,
    )
    index = run(job)
    assert carried(index).column("n").to_pylist() == [49, 48, 47]
    assert {r["file"] for r in rows_of(index)} == {"sql"}
    assert run(job) == index


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize(("changes", "words"), [
    ({"columns": ("lable",)}, "output.columns: the input has no column 'lable'.*did you mean 'label'"),
    ({"id": "ident"}, "input.id: the input has no column 'ident'"),
    ({"prompt": {"text": "txt"}}, "prompt.text: the input has no column 'txt'.*did you mean 'text'"),
    ({"sampling": {"from_columns": ["max_tokens"]}}, "sampling.from_columns.*'max_tokens'.*did you mean 'max_token'"),
])  # fmt: skip
def test_a_column_that_no_row_has(folder: Path, kind: str, changes: dict[str, Any], words: str) -> None:
    rows = [{"text": "a", "label": 1, "max_token": 5}]
    path = write_lines(folder / "rows.jsonl", rows)
    if kind == "parquet":
        path = folder / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(JobFileError, match=words):
        run(make_job(folder, **{"prompt": USER, "path": str(path), **changes}))
    assert not list(folder.glob("scratch/*/index.json"))


def test_a_template_that_hangs_costs_its_row(folder: Path) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    loop = "{% if text == 'hang' %}" + loop + "{% endif %}ok"
    rows = [{"text": t} for t in ("a", "hang", "b")]
    index = ingest_rows(folder, rows, {"user": loop}, row_timeout_s=0.25, id="text", columns=("text",))
    assert [row["custom_id"] for row in rows_of(index)] == [row["text"] for row in rows], "they were read"
    assert carried(index)["text"].to_pylist() == [row["text"] for row in rows]
    assert codes(index) == [None, "template_timeout", None]
    assert [p is None for p in prompts_of(index)] == [False, True, False]
    assert (
        "0.25 s of CPU time, with other rows and again with this row alone"
        in rows_of(index)[1]["error_message"]
    )


SLOW = "{% if text == 'slow' %}{% for i in range(99999) %}{% for j in range(700) %}{% endfor %}{% endfor %}{% endif %}"


@pytest.fixture
def limit_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.setattr(render_worker, "_ENTRY", "tests.batchinfer.child_tasks:render_with_little_cpu_time")
    monkeypatch.setenv("LIMITED_STARTS", str(tmp_path / "starts"))
    return lambda most: monkeypatch.setenv("LIMITED_MOST", str(most))


@pytest.mark.slow
def test_a_worker_that_used_up_its_cpu_time_blames_no_row(
    folder: Path, limit_workers: Callable[[int], None]
) -> None:
    """CPU time adds up over all rows. The row takes more than the worker's rest, and less than its own limit."""
    limit_workers(1)
    rows = [{"text": t} for t in ("a", "slow", "b")]
    index = ingest_rows(folder, rows, {"user": SLOW}, row_timeout_s=100.0)
    assert codes(index) == [None, None, None]


def test_a_worker_that_dies_in_the_middle_of_its_reply_is_replaced(
    folder: Path, limit_workers: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_worker, "_ENTRY", "tests.batchinfer.child_tasks:render_and_die_in_the_reply")
    index = ingest_rows(folder, [{"text": t} for t in ("a", "b", "c")], {"user": "{{ text }}"})
    assert codes(index) == [None, None, None]


def ended(monkeypatch: pytest.MonkeyPatch, folder: Path, most: int, by: int = signal.SIGKILL) -> None:
    """Kill the first `most` render workers that reach the row "victim"."""
    monkeypatch.setattr(render_worker, "_ENTRY", "tests.batchinfer.child_tasks:render_and_be_ended")
    monkeypatch.setenv("LIMITED_STARTS", str(folder / f"starts-{most}-{by}"))
    monkeypatch.setenv("ENDED_MOST", str(most))
    monkeypatch.setenv("ENDED_BY", str(int(by)))


def test_a_cpu_time_limit_below_that_of_any_batch_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends each worker by the signal of that limit."""
    ended(monkeypatch, folder, 99, signal.SIGXCPU)
    with pytest.raises(
        Unavailable, match=r"limit on a process's CPU time \(RLIMIT_CPU.* within one batch"
    ) as caught:
        ingest_rows(folder, [{"text": "victim"}])
    assert "memory" not in str(caught.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGABRT])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_kill_of_a_render_worker_costs_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals, place: int
) -> None:
    """Anything may kill a process. The row is prepared again."""
    rows = [{"text": t, "max_tokens": n + 1} for n, t in enumerate("abcd")]
    rows[place] |= {"text": "victim"}
    undisturbed = ingest_rows(folder, rows)
    expected = rows_of(undisturbed), [list(p) for p in prompts_of(undisturbed) if p is not None]
    shutil.rmtree(folder / "scratch")
    ended(monkeypatch, folder, 1, by)
    index = ingest_rows(folder, rows)
    assert (rows_of(index), [list(p) for p in prompts_of(index) if p is not None]) == expected


def test_a_row_that_kills_workers_twice_is_an_error_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(monkeypatch, folder, 99, signal.SIGSEGV)
    index = ingest_rows(folder, [{"text": t} for t in ("a", "victim", "b", "victim", "c")])
    assert codes(index) == [None, "template_crash", None, "template_crash", None]
    assert "(SIGSEGV)), with other rows and again with this row alone" in rows_of(index)[1]["error_message"]
    assert texts(folder, index)[2] == "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert (folder / "starts-99-11").stat().st_size == 5, "each such row costs two processes"


def test_kills_while_a_constraint_is_checked_cost_no_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker waits for the process that checks, which is retried once."""
    rows = [{"text": "a", "regex": None}, {"text": "b", "regex": "[0-9]+"}, {"text": "c", "regex": "("}]
    ended(monkeypatch, folder, 2)
    task = "tests.batchinfer.child_tasks:render_and_be_ended_at_a_check"
    monkeypatch.setattr(render_worker, "_ENTRY", task)
    index = ingest_rows(folder, rows, sampling={"from_columns": ["regex"]})
    assert codes(index) == [None, None, "bad_constraint"]


STOPPED = """
import os, subprocess, sys, threading, time
from pathlib import Path
from batchinfer.input.prompts import render_worker
from tests.batchinfer.store.index.test_ingest import LIMIT_S, LOOPS, PAUSE_S, codes, ingest_rows

made, start = [], render_worker.RenderWorker._start
def started(worker):
    start(worker)
    made.append(worker)

def stop():
    while not (made and made[0]._at.value == 1):
        time.sleep(0.002)
    time.sleep(0.35)  # more than its parent takes to see that it is at this row
    who = f"{made[0]._child.pid} {os.getpid() if sys.argv[2] == 'job' else ''}"
    command = f"kill -STOP {who}; sleep {PAUSE_S}; kill -CONT {who}"
    subprocess.run(["sh", "-c", command], start_new_session=True, stderr=subprocess.DEVNULL)

render_worker.IDLE = 1
render_worker.RenderWorker._start = started
threading.Thread(target=stop).start()
rows = [{"text": text} for text in ("a", "slow", "b")]
print(codes(ingest_rows(Path(sys.argv[1]), rows, {"user": LOOPS}, row_timeout_s=LIMIT_S)), len(made))
"""
LOOPS = SLOW.replace("700", "150")
# The row takes half a second of a core's time, and a pause of its parent adds half a second: it is within its limit
# even on a machine with five times the load. The pause is longer than the limit
LIMIT_S, PAUSE_S = 3.0, 3.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "processes"), [("job", 1), pytest.param("worker", 2, marks=pytest.mark.slow)]
)
def test_a_stop_blames_no_row(folder: Path, who: str, processes: int) -> None:
    """Ctrl-Z, a container or a virtual machine pauses the whole job; or only the worker, which is replaced."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED, str(folder), who], env=environment(), text=True, capture_output=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stdout == f"[None, None, None] {processes}\n", done.stderr


@pytest.mark.usefixtures("cold_children")
def test_workers_end_with_ingest(folder: Path) -> None:
    ingest_rows(folder, [{"text": "a"}])
    # Zombie processes, such as another test's, have no command line
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert [p for p in alive if "render_worker:serve" in " ".join(p.cmdline())] == []


def test_a_complete_index_is_used_again(folder: Path) -> None:
    path = write_lines(folder / "rows.jsonl", [{"text": "a"}])
    job = make_job(folder, prompt=USER, path=str(path))
    tokenizer = Tokenizer.load(job.model.path)
    seen: list[IngestProgress] = []
    first = ingest(job, tokenizer, options(), folder / "scratch", seen.append)
    size = path.stat().st_size
    assert (seen[-1].rows, seen[-1].bytes_read, seen[-1].bytes_total) == (1, size, size)
    assert len(seen[-1].keys) == 32
    assert (
        ingest(job, tokenizer, options(), folder / "scratch", seen.append)
        == first
        == Index.open(first.folder)
    )
    assert len(seen) == 1
    first.check_inputs_unchanged()
    (first.folder / "index.json").unlink()
    with pytest.raises(StorageError, match="no complete index"):
        Index.open(first.folder)
    assert ingest(job, tokenizer, options(), folder / "scratch", seen.append) == first
    assert len(seen) == 2
    write_lines(path, [{"text": "b"}, {"text": "c"}])
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputCorrupt, match="changed"):
        first.check_inputs_unchanged()
    assert ingest(job, tokenizer, options(), folder / "scratch").folder != first.folder


def test_an_index_of_a_newer_format_is_refused(folder: Path) -> None:
    index = ingest_rows(folder, [{"text": "a"}])
    marker = index.folder / "index.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": INDEX_FORMAT + 1}))
    with pytest.raises(StorageError, match=f"index format {INDEX_FORMAT + 1}"):
        Index.open(index.folder)


def test_an_empty_file_is_an_empty_index(folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(b"")
    index = run(
        make_job(folder, prompt=USER, path=str(folder / "rows.jsonl"), columns=("text",), unique_ids=True)
    )
    assert (index.rows, index.index_parts, len(index.tokens)) == (0, [], 0)


def test_a_missing_chat_template_is_a_mistake_in_the_job(folder: Path) -> None:
    checkpoint(folder / "model", template=None)
    with pytest.raises(JobFileError, match=r"no chat template; use prompt\.text"):
        ingest_rows(folder, [{"text": "a"}])
    assert codes(ingest_rows(folder, [{"text": "a"}], {"text": "text"})) == [None]


@pytest.mark.slow
@pytest.mark.usefixtures("cold_children")
@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_million_rows_in_bounded_memory(tmp_path: Path, form: str) -> None:
    """The limit is far below the memory of a million rows in any process."""
    checkpoint(tmp_path / "model")
    found = measure(tmp_path, 1_000_000, 300, form, workers=2)
    print(json.dumps(found))
    assert found["error_rows"] == 0
    assert found["peak_mib"] < 1400
