"""Work keys of stored answers are stable across versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.sampling import CONSTRAINTS, DERIVED, SamplingParams
from batchinfer.input.openai import CHAT_URL, openai_defaults
from batchinfer.input.prompts.keys import CONSTRAINT_RULES, token_bytes, work_key
from tests.batchinfer.store.index.ingest_kit import checkpoint, make_job, rows_of, run, write_lines

CONTEXT = bytes(range(32))
OWN = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
       "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs",
       "repetition_stop")  # fmt: skip

# Each digest is the key of stored answers and may never change: a new option is absent from the key at its
# default. Add new rows at the end.
ROWS: list[tuple[dict[str, Any], str]] = [
    ({}, "af83b9d7e434ef6c8d3bc0d6b3bf3ec3135ac37ee88f2a0d7d27d5ab7b7e35d4"),
    ({"ids": [5]}, "0c982f2ba5cc5b45225d4a1fd2b766a36c23d285ed9984e18902a80a0701fb60"),
    ({"ids": list(range(300))}, "5463a48eb503364c48399756fbc92953a5cc76ecc7e21dc8e388b2f734f7d0bd"),
    ({"max_tokens": 8}, "b4909146d415aa4bb7f7a5c9a18bb989a91aeb2129a59b7d6f4197f8b78d2ed0"),
    ({"max_tokens": 256, "temperature": 0, "top_p": 1, "stop": []},
        "af83b9d7e434ef6c8d3bc0d6b3bf3ec3135ac37ee88f2a0d7d27d5ab7b7e35d4"),
    ({"top_k": 5, "seed": 9}, "af83b9d7e434ef6c8d3bc0d6b3bf3ec3135ac37ee88f2a0d7d27d5ab7b7e35d4"),
    ({"min_tokens": 2, "ignore_eos": True}, "801c67fd4f2875b341676f34ae9c236ae5a8ee61a1a8476aabe48020cc5698f3"),
    ({"stop": ["\n", "END"]}, "7ae679cc6a92eb60c8330f764330979379484e246ac1791f5f5d60811e2e72f7"),
    ({"stop": "grün 漢"}, "a69cd36e9dac48bc644baf780cb0ac8065cfd160c5117c50741a4012e4252f61"),
    ({"stop_token_ids": [7, 3]}, "ce212c689adebb491d47e2b047a62db410f6f1673e6e6aad3d7fe5ce4df440e9"),
    ({"repetition_penalty": 1.1}, "817b4f63e5a1cbd830aaf4910a3eb988df25dc2e8c7294d80fc44488a9abe3a4"),
    ({"presence_penalty": 0.5, "frequency_penalty": -0.25},
        "6da720324d707c7c817bc03f65d9b350ecd29d362f91a71e73c4c1429a058a3c"),
    ({"temperature": 1}, "023aedc9a68b8c7aa351dfd68e09bba37a3a1718629991943b88e6492ad9c783"),
    ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05},
        "461ddf0260395d18486d194f84f413b776db6526d28893a0b73979794daf0c75"),
    ({"temperature": 0.7, "seed": -3}, "6acedac3e591c00d6e7e07680d880f23880bb948cc7173a4230ce46cb3b0fe2a"),
    ({"temperature": 1}, "7a05ee4db9c2e89f380a86ba8727d147465590ba1c443f0a84b9d98a32e8067b"),
    ({"logprobs": 0}, "a7608609b55a559fd60644a94425c34cdae2a9163f287e2dc78a186b078f6c4b"),
    ({"logprobs": 5, "temperature": 0}, "7eed6f2fc13c5793676a5639f84e573a45e05aaef310df19f6f7db76111928c4"),
    ({"repetition_stop": 0}, "af83b9d7e434ef6c8d3bc0d6b3bf3ec3135ac37ee88f2a0d7d27d5ab7b7e35d4"),
    ({"repetition_stop": 64}, "3d339c268d74c586d3d06a06dde0748e946a16a94fd46dd23f234b5d410cb6dd"),
]  # fmt: skip
# These may change with CONSTRAINT_RULES, and only with them.
CONSTRAINED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{3}"}, "17ee2e6dafe7685b71285881bed5e45f73c94bd235d2945476d7e26edfc366f4"),
    ({"choice": ["yes", "no"]}, "5e56451b4f92be0ffd32bf445a6f4996881871e78644e3451b881da7bf1b8429"),
    ({"choice": ["no", "yes", "no"]}, "5e56451b4f92be0ffd32bf445a6f4996881871e78644e3451b881da7bf1b8429"),
    ({"json_object": True}, "99533851fa7751c4b6d949de0027c44ebe9a4e1acb9af9bc1f203d0f22df4347"),
    ({"grammar": 'start: "a"'}, "5f6eb6d93e99e57f48c07afe6c0d6852e0112596ea9689b67d522371fb520a5a"),
    ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        "a1ae6a0fe9ad2c026eb09738ae91486f00fff6f88900d7cc9ce0d69caaa4739a"),
    ({"json_schema": '{ "type": "object", "properties": {"a": {"type": "integer"}} }'},
        "a1ae6a0fe9ad2c026eb09738ae91486f00fff6f88900d7cc9ce0d69caaa4739a"),
]  # fmt: skip
REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [5, 6]}, "a0952c284e0535bab6dcb3c0a8e2dfd1d88e1c22544541da6e49b07cbd252460"),
    ({"prompt": [5, 6], "temperature": 0}, "63ea9d35641b91667e85b81f2d3aaeb2bd941cabb4ac9ff83e163b164baac924"),
    ({"prompt": [5, 6], "max_tokens": 3, "stop": "x"},
        "29867145cd71b0bf0754c18afa6e01f3c6a261c94f516df1cc6bfe2a6251eea6"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    return tmp_path


def keys_of(folder: Path, rows: list[dict[str, Any]], **job: Any) -> list[str]:
    path = str(write_lines(folder / "rows.jsonl", rows))
    made = make_job(folder, path=path, **job)
    return [row["key"].hex() for row in rows_of(run(made, context=CONTEXT))]


def test_rows_keep_their_keys(folder: Path) -> None:
    rows = [{"ids": [1, 2, 3], **row} for row, _ in ROWS]
    found = keys_of(folder, rows, prompt={"token_ids": "ids"}, sampling={"from_columns": OWN})
    assert found == [key for _, key in ROWS]


def test_rows_with_constraints_keep_their_keys(folder: Path) -> None:
    rows = [{"ids": [1, 2, 3], **row} for row, _ in CONSTRAINED]
    named = [name for name in CONSTRAINTS if name not in DERIVED]
    found = keys_of(folder, rows, prompt={"token_ids": "ids"}, sampling={"from_columns": named})
    assert found == [key for _, key in CONSTRAINED]


def test_constraint_rules_count_for_constrained_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SamplingParams(stop=('"regex":', '{"regex":""}', "json_object"))
    constrained = [
        SamplingParams(regex="a"),
        SamplingParams(choice=("a",)),
        SamplingParams(grammar="start: A"),
        SamplingParams(json_schema="{}"),
        SamplingParams(json_object=True),
    ]

    def keys(params: SamplingParams) -> tuple[bytes, bytes]:
        said = params.canonical().to_json()
        return work_key(CONTEXT, said, b"abcd"), work_key(CONTEXT, said, b"abcd", 1)

    before = [keys(params) for params in (free, *constrained)]
    monkeypatch.setattr("batchinfer.input.prompts.keys.CONSTRAINT_RULES", CONSTRAINT_RULES + 1)
    after = [keys(params) for params in (free, *constrained)]
    assert after[0] == before[0]
    assert not {key for pair in before[1:] for key in pair} & {key for pair in after[1:] for key in pair}


def test_openai_requests_keep_their_keys(folder: Path) -> None:
    frame = {"method": "POST", "url": "/v1/completions"}
    rows = [{"custom_id": str(n), **frame, "body": body} for n, (body, _) in enumerate(REQUESTS)]
    assert keys_of(folder, rows, prompt=None, format="openai") == [key for _, key in REQUESTS]


def test_an_openai_chat_keeps_its_key() -> None:
    params = openai_defaults(CHAT_URL, {}, 512).canonical().to_json()
    key = work_key(CONTEXT, params, token_bytes([1, 2, 3]))  # type: ignore[arg-type]
    assert key.hex() == "04ffbee0b2fddf571314396108585c88f0b5215193529421298fcbd962ed35b0"


def test_parts_of_a_key_do_not_run_together() -> None:
    assert work_key(b"ab", "c", b"") != work_key(b"a", "bc", b"")
    assert work_key(b"a", "", b"bc") != work_key(b"a", "b", b"c")
    assert len({work_key(b"a", "b", b"c", k) for k in range(3)}) == 3


def test_greedy_is_a_column(folder: Path) -> None:
    rows = [{"t": 0}, {"t": -0.0}, {"t": 0.5}, {"t": "hot"}, {"t": None}]
    path = str(write_lines(folder / "rows.jsonl", [{"ids": [1], **row} for row in rows]))
    own = {"temperature": 0.1, "stop": ('"temperature":0.0,',), "from_columns": {"temperature": "t"}}
    index = run(make_job(folder, prompt={"token_ids": "ids"}, path=path, sampling=own))
    found = rows_of(index)
    assert [row["greedy"] for row in found] == [True, True, False, None, False]
    assert found[0]["key"] == found[1]["key"], "zero below zero is greedy, too"
