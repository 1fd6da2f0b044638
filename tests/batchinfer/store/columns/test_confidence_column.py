"""Tokens of an answer that count for a value: from its start until no other value is possible."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.store.columns.confidence_column import AnswerTokens, confidence_array
from batchinfer.store.columns.field_values import ListedFields

END = 256
VALUES = st.recursive(
    st.booleans() | st.sampled_from(["a", 'q"', "é{[", "", 1, 12, None, -0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abü.:"), inner, max_size=3),
    max_leaves=8,
)


class Bytes:
    """Tokens are bytes of UTF-8, an end token, and a few of several bytes."""

    pieces: Sequence[bytes] = [bytes([n]) for n in range(256)] + [b"", b"no", b" id", b'": "']

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        return [b"".join(self.pieces[id] for id in row).decode("utf-8", "replace") for row in rows]

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        return self.decode_batch(rows)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return ["<end>" if id == END else self.decode_batch([[id]])[0] for id in ids]


def tokens(*parts: str | int) -> list[int]:
    return [id for part in parts for id in ([part] if isinstance(part, int) else part.encode())]


def confidence(ids: list[int], text: str, choices: list[str], counted: Sequence[int]) -> None:
    """Check that exactly the tokens at positions `counted` contribute to the confidence of `text`."""
    logprobs = [-1.0 - at if at in counted else -100.0 for at in range(len(ids))]
    answer = AnswerTokens.of(text, ids, logprobs, Bytes())
    found = confidence_array(iter([answer, None]), choices, None).to_pylist()
    assert found == [pytest.approx(math.exp(sum(-1.0 - at for at in counted))), None]


@pytest.mark.parametrize(
    ("ids", "choices", "counted"),
    [
        (tokens("yes", END), ["no", "yes"], [0]),
        (tokens(257, END), ["no", "no idea"], [0, 1]),  # its end decides
        (tokens(257, 258, "ea", END), ["no", "no idea"], [0, 1]),
        (tokens("né", END), ["nè", "né"], [0, 1, 2]),  # they differ in the second byte of the character
        (tokens("né", END), ["no", "né"], [0, 1, 2]),
    ],
)
def test_tokens_count_up_to_the_one_that_decides(
    ids: list[int], choices: list[str], counted: list[int]
) -> None:
    (text,) = Bytes().decode_batch([ids])
    confidence(ids, text, choices, counted)
    before = tokens("hm, yes, né.\n")  # reasoning, which is no part of the answer
    confidence([*before, *ids], text, choices, [len(before) + at for at in counted])


def schema_of(value: Any) -> dict[str, Any]:
    """Return the schema of values with this shape, in which each text, number and null has one alternative."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: schema_of(one) for name, one in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema_of(one) for one in value]}
    return {"type": ["boolean", "null"]} if isinstance(value, bool) else {"enum": [value, "other"]}


def places(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        each = [places(one, f"{path}.{name}" if path else name) for name, one in value.items()]
    elif isinstance(value, list):
        each = [places(one, f"{path}[{at}]") for at, one in enumerate(value)]
    else:
        return {path: value}
    return {key: one for found in each for key, one in found.items()}


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_every_listed_value_is_found_in_its_place(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    found = list(ListedFields({"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": schema_of(value)}}).of(text))
    wanted = places(value)
    assert len(found) >= len(wanted)
    for one in found:
        assert json.loads(text[one.start : one.end]) == wanted.get(one.path, wanted[one.path])
        assert len(one.listed) > 1


def test_what_lists_no_values_has_no_confidence() -> None:
    schema = {
        "properties": {"a": {"const": 1}, "b": {"type": "integer"}, "c": {"anyOf": [{"enum": [1, 2]}, {}]}}
    }
    assert not list(ListedFields(schema).of('{"a": 1, "b": 2, "c": 1}'))
    arrays = confidence_array(iter([None]), (), schema)
    assert arrays.type == pa.map_(pa.string(), pa.float64())
    assert arrays.to_pylist() == [None]
