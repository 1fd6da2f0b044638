"""Answers under random schemas, older keywords included: all are valid, or the schema is refused."""

from __future__ import annotations

import random

import pytest

from batchinfer.store.columns.answer_check import parse_answer
from batchinfer.store.columns.schema_columns import schema_columns
from tests.batchinfer.input.constraints.random_schemas import Counts, SchemaMaker, compiled, drawn, try_schema
from tests.examples import examples


def test_answers_under_random_schemas_are_valid() -> None:
    counts = Counts()
    for seed in range(examples(120, 20_000)):
        try_schema(SchemaMaker(seed).document(), seed, counts)
    assert counts.wrong == []
    assert counts.followed > 40
    assert counts.texts > 300


@pytest.mark.parametrize("form", ["date", "date-time", "time", "uuid"])
def test_columns_hold_all_answers_of_their_grammar(form: str) -> None:
    schema = {"type": "object", "properties": {"v": {"type": "string", "format": form}}, "required": ["v"]}
    grammar, columns, rng = compiled(schema), schema_columns(schema), random.Random(form)
    texts = [text for _ in range(100) if (text := drawn(grammar, rng)) is not None]
    assert len(texts) > 90
    for text in texts:
        columns.check(parse_answer(text))
