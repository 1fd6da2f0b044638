"""Answers under random schemas, older keywords among them: all that a grammar allows are valid, or it is refused."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.batchinfer.data.prompts.random_schemas import Counts, SchemaMaker, try_schema


def tried(seeds: Iterable[int]) -> Counts:
    counts = Counts()
    for seed in seeds:
        try_schema(SchemaMaker(seed).document(), seed, counts)
    return counts


def test_answers_under_random_schemas_are_valid() -> None:
    counts = tried(range(120))
    assert counts.wrong == []
    assert counts.schemas - sum(counts.refused.values()) > 40
    assert counts.texts > 300


@pytest.mark.slow
def test_answers_under_many_random_schemas_are_valid() -> None:
    counts = tried(range(10_000, 30_000))
    print(counts.schemas, sum(counts.refused.values()), counts.texts, counts.twice, len(counts.rejected))
    assert counts.wrong == []
