"""Answers that their columns cannot store become error rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from batchinfer.core.request import Completion, Request, RowError, Tokens
from batchinfer.core.sampling import SamplingParams
from batchinfer.store.columns.answer_check import AnswerCheck
from batchinfer.store.columns.schema_columns import SchemaColumns, schema_columns
from batchinfer.store.outputs.tokens import TokensKind

NUMBER = schema_columns({"type": "object", "properties": {"n": {"type": "number"}, "rest": {}}})


class Utf8:
    def decode_batch(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [bytes(row).decode() for row in rows]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        raise NotImplementedError


def answered(text: str, error: RowError | None = None) -> Completion:
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Completion(b"k" * 32, Tokens(tokens), "stop", error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"n": 1e9999999999999999999}', "exponent"),
        ('{"rest": [1e-9999999999999999999]}', "exponent"),
        ('{"rest": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"n": "x"}', "n: this is not a number"),
        ('{"n": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=lambda text: text[:30],
)
def test_what_cannot_be_held_is_an_error(text: str, words: str) -> None:
    (found,) = AnswerCheck(NUMBER, Utf8()).check_all([answered(text)])
    assert found.error is not None
    assert (found.error.code, found.finish_reason) == ("unfit_output", "error")
    assert words in found.error.message


def test_valid_and_failed_answers_are_unchanged() -> None:
    failed = RowError("incomplete_output", "policy", "cut")
    given = [answered('{"n": 1.5, "rest": 1e999}'), answered('{"n"', failed), answered("{}")]
    assert AnswerCheck(NUMBER, Utf8()).check_all(given) == given


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "\\u0061": 1}}]', '{"": 1, "x": 2, "": 1}']
)
@pytest.mark.parametrize("columns", [NUMBER, None])
def test_a_duplicate_name_in_an_object_is_an_error(text: str, columns: SchemaColumns | None) -> None:
    """JSON readers differ in which value counts."""
    (found,) = AnswerCheck(columns, Utf8()).check_all([answered(text)])
    assert found.error is not None
    assert "each name may occur once" in found.error.message
    apart = answered('[{"a": 1}, {"a": {"a": 1e9999}}]')
    assert AnswerCheck(None, Utf8()).check_all([apart]) == [apart]


@pytest.mark.parametrize(("text", "fits"), [
    ('<tool_call>\n{"name": "f{", "arguments": {"a": true, "b": true}}\n</tool_call>', True),
    ('<tool_call>\n{"name": "f", "arguments": {"a": true, "a": false}}\n</tool_call>', False),
    ('f{[ARGS]{"a": {"b": 1}}[TOOL_CALLS]f[ARGS]{"a": [{"b": 1, "\\u0062": 1}]}', False),
    ("{" * 50, True),
])  # fmt: skip
def test_arguments_of_calls_name_each_property_once(text: str, fits: bool) -> None:
    given = answered(text)
    (found,) = AnswerCheck(NUMBER, Utf8()).check_all([given], calling={given.key})
    assert (found == given) == fits
    if found.error is not None:
        assert (found.error.code, "name of an earlier one" in found.error.message) == ("unfit_output", True)


def test_answers_under_a_grammar_of_calls_are_checked() -> None:
    given = answered('f{"a": 1, "a": 1}')
    receiver = TokensKind().receiver(None, Utf8())
    request = Request(given.key, np.zeros(1, np.int32), SamplingParams(tool_call="{}"))
    receiver.expect([request])
    (found,) = receiver.receive([given])
    assert found.error is not None
    assert receiver.receive([given]) == [given]  # it is no longer running
