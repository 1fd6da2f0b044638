"""Sections of a job that contradict each other: `run` refuses them before an engine starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.batchinfer.wrong_jobs import NO_ENGINE, CliOf, Place

PLAIN = {"prompt": "{text: text}", "sampling": None}
CHAT = {"sampling": None}
LISTS = {"output": "{path: out/res, explode: false}"}
SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NESTED = "[" * 100_000


def output(**more: Any) -> dict[str, str]:
    return {"output": json.dumps({"path": "out/res", **more})}


# Sections in place of the right ones (None: without it), and words of the message
CASES: list[tuple[dict[str, str | None], tuple[str, ...]]] = [
    (PLAIN | {"task": "classify"}, ("classify.choices: are missing",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a]}"}, ("classify.choices: has one label",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b, a]}"}, ('has "a" 2 times',)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b], choices_from_column: c}"},
        ("is given beside choices",)),
    (PLAIN | {"task": "classify", "classify": "{choices_from_column: text, calibrate: true}"},
        ("labels of their own",)),
    (PLAIN | {"task": "classify", "classify": "{choices: [a, b], calibrate: 3}"},
        ("must be true or false, or a text",)),
    (PLAIN | {"task": "score", "classify": "{choices: [a, b]}"}, ("is given, but the job has not task: classify",)),
    (PLAIN | {"task": "score", "sampling": "{max_tokens: 3}"}, ("sampling: says how tokens are chosen",)),
    (PLAIN | {"score": "{per_token: true}"}, ("so that its answers are texts",)),
    (PLAIN | {"task": "score", "score": "{continuation: nothing}"}, ("score.continuation",)),
    (CHAT | {"task": "rerank", "rerank": "{yes: no}"}, ('rerank.no: is "no", as yes is',)),
    (CHAT | {"task": "rerank", "rerank": "{query: text}"}, ("rerank.query",)),
    (CHAT | {"rerank": "{yes: good}"}, ("so that its answers are texts",)),
    (CHAT | {"task": "rerank", "sampling": "{max_tokens: 3}"}, ("answers are scores of relevance",)),
    (CHAT | {"task": "rerank", "classify": "{choices: [a, b]}"}, ("is given, but the job has not task: classify",)),
    (CHAT | {"task": "rerank", "prompt": '{user: "{{ text }}", truncate: right}'}, ("and not the document",)),
    (LISTS, ("each row has one answer",)),
    (LISTS | {"sampling": "{temperature: 1, n: 2, from_columns: [n]}"}, ("n is read from a column",)),
    (LISTS | {"sampling": "{temperature: 1, n: 2}", "input": "{path: rows.jsonl, id: id, expected: text}"},
        ("input.expected is compared with single answers",)),
    ({"sampling": "{n: 3}"}, ("sampling.n: is 3, but temperature is 0",)),
    ({"sampling": "{n: 0, temperature: 1}"}, ("sampling.n",)),
    ({"sampling": "{best_of: 3}"}, ("sampling.best_of: is 3, but temperature is 0",)),
    ({"sampling": "{n: 4, best_of: 3, temperature: 1}"},
        ("sampling.best_of: is 3, fewer than sampling.n, which is 4",)),
    ({"sampling": "{n: 2000, temperature: 1}"}, ("sampling.n",)),
    ({"sampling": "{max_tokens: fit}"}, ("sampling.max_tokens", "no constraint that bounds the answers")),
    ({"sampling": "{max_tokens: fits}"}, ("sampling.max_tokens", "a whole number from 1 to 2,147,483,647, or fit")),
    ({"sampling": "{max_tokens: fit, json_object: true}"}, ("sampling.max_tokens", "any JSON object is allowed")),
    ({"sampling": "{max_tokens: fit}", **output(schema={"properties": {"a": {"type": "string"}}, "type": "object"})},
        ("sampling.max_tokens", "is fit, and answers have no bound: a: give maxLength")),
    ({"sampling": "{regex: a, choice: [b], from_columns: [grammar]}", **output(schema=SHAPE)},
        ("sampling.regex", "sampling.choice", "sampling.from_columns")),
    (output(schema=NESTED), ("output.schema",)),
    (output(schema_file="deep.json"), ("output.schema_file",)),
    # An OpenAI file may ask in any row for a column of log-probabilities
    (output(schema={"properties": {"LogProbs": {}}}), ("another column",)),
    (output(schema=SHAPE, column="logprobs"), ("another column",)),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "words"), CASES)
def test_refused(
    sections: dict[str, str | None], words: tuple[str, ...], place: Place, cli_of: CliOf
) -> None:
    (place.folder / "deep.json").write_text(NESTED)
    text = {name: "" if one is None else f"{name}: {one}" for name, one in sections.items()}
    told = cli_of(NO_ENGINE)("run", place.job(**text))
    assert (told.code, [word for word in words if word not in told.err]) == (78, []), told.err
    assert not place.results.exists()
