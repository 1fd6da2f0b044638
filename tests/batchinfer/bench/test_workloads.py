"""Workloads are the published ones, independent of the model's vocabulary."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.bench.export import export_workload
from batchinfer.bench.workloads import VOCAB, WORKLOADS, make_workload
from batchinfer.core.errors import UsageError
from tests.examples import examples

NAMES = list(WORKLOADS)


def uniform(r: random.Random, count: int) -> tuple[int, ...]:
    return tuple(r.randrange(300, 32_000) for _ in range(count))


def first() -> list[tuple[tuple[int, ...], int]]:
    r = random.Random(1)
    prefix = uniform(r, 512)
    return [(prefix + uniform(r, r.randint(32, 128)), 8) for _ in range(256)]


def second() -> list[tuple[tuple[int, ...], int]]:
    r = random.Random(2)

    def log_uniform(a: int, b: int) -> int:
        return round(math.exp(r.uniform(math.log(a), math.log(b))))

    return [(uniform(r, log_uniform(16, 1024)), log_uniform(8, 256)) for _ in range(128)]


def third() -> list[tuple[tuple[int, ...], int]]:
    r = random.Random(3)
    return [(uniform(r, 32), 128) for _ in range(128)]


@pytest.mark.parametrize(
    ("name", "expected"), [("shared-prefix", first), ("mixed", second), ("decode", third)]
)
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_published_workloads_have_exactly_these_rows(name, expected, vocab):
    found = make_workload(name, vocab)
    assert [(row.prompt, row.max_tokens) for row in found.rows] == expected()


@settings(max_examples=examples(10, 30), deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 80), st.integers(40, 40_000))
def test_a_vocabulary_changes_ids_and_no_lengths(name, rows, vocab):
    usual, found = make_workload(name, VOCAB, rows), make_workload(name, vocab, rows)
    assert [(len(r.prompt), r.max_tokens) for r in found.rows] == [
        (len(r.prompt), r.max_tokens) for r in usual.rows
    ]
    assert all(0 <= i < vocab for row in found.rows for i in row.prompt)
    assert len(found.rows) == rows
    assert found == make_workload(name, vocab, rows)


@pytest.mark.parametrize("name", ["shared-prefix", "mixed", "decode", "prefix-tree", "long-context"])
def test_fewer_rows_are_the_first_ones(name):
    assert make_workload(name, VOCAB, 10).rows == make_workload(name, VOCAB).rows[:10]


def test_a_prefix_tree_is_sixteen_documents_with_sixteen_questions():
    rows = make_workload("prefix-tree", VOCAB).rows
    assert len(rows) == 256
    assert len({row.prompt[:64] for row in rows}) == 1
    documents = Counter(row.prompt[: 64 + 256] for row in rows)
    assert set(documents.values()) == {16}
    assert len(documents) == 16
    assert len({row.prompt[: 64 + 1] for row in rows}) == 16, "documents part at their first token"
    assert len({row.prompt[: 64 + 256 + 1] for row in rows}) == 256, "and so do the questions about one"


def test_four_rows_in_ten_are_duplicates():
    found = make_workload("duplicates", VOCAB)
    assert found.duplicates == round(0.4 * 128)
    assert len(found.rows) == 128


@settings(max_examples=examples(10, 30), deadline=None)
@given(st.integers(2, 300))
def test_one_output_is_twenty_times_the_median(rows):
    outputs = [row.max_tokens for row in make_workload("long-tail", VOCAB, rows).rows]
    rest = sorted(outputs)[:-1]
    assert max(outputs) == 20 * statistics.median_low(outputs)
    assert max(rest) <= 40


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [("decoding", None, "'decoding'; it can be shared-prefix"), ("decode", 0, "--rows is 0; at least 1")],
)
def test_what_cannot_be_made_is_named(name, rows, told):
    with pytest.raises(UsageError, match=told):
        make_workload(name, VOCAB, rows)


def test_an_export_holds_the_same_rows(tmp_path: Path):
    workload = make_workload("mixed", 1000, 20)
    export_workload(workload, tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(tuple(line["prompt_token_ids"]), line["max_tokens"]) for line in lines] == [
        (row.prompt, row.max_tokens) for row in workload.rows
    ]
    assert all(set(line) == {"prompt_token_ids", "max_tokens"} for line in lines)
