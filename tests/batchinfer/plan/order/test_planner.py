"""The plan contains each missing request once, in an order that shares prefixes and starts long work first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.plan.order import planner, prefixes, sorted_prompts
from batchinfer.plan.order.block_hashes import BLOCK
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.plan.order.prefixes import largest_prefixes
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.token_store import TokenStore
from tests.batchinfer.store.small_index import (
    answer,
    bad_row,
    failure,
    good_row,
    keys_in,
    mixed_rows,
    write_index,
)
from tests.examples import examples


def planned(plan: Plan) -> list[dict[str, Any]]:
    return pq.read_table(plan.path).to_pylist()


ROOTS = ContentRoots(1 << 20)


def plan_rows(
    folder: Path, rows: list[Any], *, stored: Iterable[Any] = (), rows_per_part: int = 1000, **more: Any
) -> Plan:
    """Plan rows. `stored`: rows that have answers in the store."""
    index = write_index(folder / "x", rows, rows_per_part=rows_per_part)
    with CompletionStore(folder / "completions") as store:
        store.append(stored)
        store.commit()
        return plan_job(index.index_parts, index.tokens, store.parts(), folder / "plan", ROOTS, **more)


def test_counts(tmp_path: Path) -> None:
    rows = mixed_rows(70, distinct=20)
    keys = keys_in(rows)
    plan = plan_rows(tmp_path, rows, stored=map(answer, keys[:5]))
    assert (plan.rows, plan.error_rows, plan.distinct) == (70, 10, len(keys))
    assert plan.duplicates == 70 - 10 - len(keys)
    assert (plan.present, plan.to_run) == (5, len(keys) - 5)
    assert plan.prompt_tokens == 3 * plan.to_run
    assert plan.expected_tokens == 8 * plan.to_run
    assert plan.longest == 11
    users = [row["users"] for row in planned(plan)]
    assert sum(users) + sum(1 for row in rows if row.get("key") in keys[:5]) == 60


@pytest.mark.parametrize("rows", [[], [bad_row(0), bad_row(1)]], ids=["no rows", "error rows"])
def test_without_good_rows_the_plan_is_empty(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    plan = plan_rows(tmp_path, rows)
    assert (plan.rows, plan.error_rows) == (len(rows), len(rows))
    assert (plan.distinct, plan.to_run, plan.longest) == (0, 0, 0)
    assert list(plan.batches(10)) == []


def test_rows_that_share_with_running_rows_come_first(tmp_path: Path) -> None:
    """Running rows are not planned again. Rows with their prefixes come first, the newest prefix before older ones,
    and before longer rows. Prefixes of finished rows may have been evicted.
    """
    rows = [good_row(n, [group] * 40 + [n], 8 * (group + 1)) for n, group in enumerate([0, 1, 2, 3] * 3)]
    keys = [row["key"] for row in rows]
    begun = {"begun": [keys[2], keys[0], keys[1]], "in_flight": [keys[0], keys[1]]}
    plan = plan_rows(tmp_path, rows, stored=[answer(keys[2])], **begun)
    groups = [keys.index(row["key"]) % 4 for row in planned(plan)]
    assert groups == [1, 1, 0, 0, 3, 3, 3, 2, 2]
    assert not {row["key"] for row in planned(plan)} & set(begun["begun"])
    assert (plan.to_run, plan.rows_to_run, plan.again_tokens) == (9, 9, 3 * 40)
    assert plan.shared_prefix_tokens == 40 * (1 + 1 + 2 + 1)


def test_retryable_errors_are_run_again_only_when_asked(tmp_path: Path) -> None:
    rows = [good_row(i, [i]) for i in range(4)]
    keys = keys_in(rows)
    stored = [answer(keys[0]), failure(keys[1], retryable=True), failure(keys[2], retryable=False)]
    usual = plan_rows(tmp_path / "a", rows, stored=stored)
    again = plan_rows(tmp_path / "b", rows, stored=stored, retry_errors=True)
    assert {row["key"] for row in planned(usual)} == {keys[3]}
    assert {row["key"] for row in planned(again)} == {keys[1], keys[3]}


def test_long_work_comes_first_and_groups_stay_together(tmp_path: Path) -> None:
    shared = list(range(20))
    rows = [
        good_row(0, [900], 500),
        good_row(1, [*shared, 1], 10),
        good_row(2, [901], 60),
        good_row(3, [*shared, 2], 100),
        good_row(4, [902], 5),
    ]
    plan = plan_rows(tmp_path, rows)
    order = [next(r["row_id"] for r in rows if r["key"] == p["key"]) for p in planned(plan)]
    assert order == [0, 3, 1, 2, 4]
    assert plan.shared_prefix_tokens == 20
    assert [p["prefix_tokens"] for p in planned(plan)] == [0, 20, 20, 0, 0]


def test_an_output_token_weighs_more_than_a_prompt_token(tmp_path: Path) -> None:
    rows = [good_row(0, list(range(300)), 5), good_row(1, [7], 100), good_row(2, list(range(50, 90)), 100)]
    order = [p["expected_tokens"] + p["token_count"] for p in planned(plan_rows(tmp_path, rows))]
    assert order == [140, 101, 305]


def test_windows_are_the_plan_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_ROWS_PER_GROUP", 16)  # windows are within one row group or cross two
    plan = plan_rows(tmp_path, mixed_rows(100))
    batches = list(plan.batches(9))
    assert [len(w) for w in batches[:-1]] == [9] * (len(batches) - 1)
    assert [key for w in batches for key in w.keys] == [row["key"] for row in planned(plan)]
    assert [n for w in batches for n in w.numbers("seq").tolist()] == list(range(plan.to_run))
    assert [n for w in batches for n in w.numbers("bucket").tolist()] == [4] * plan.to_run
    for rows, every in (
        (9, 2),
        (9, 3),
        (7, 5),
        (40, 2),
        (9, 50),
    ):  # `every`: only the middle window of each group
        wanted = [w.keys for w in plan.batches(rows)][every // 2 :: every]
        assert [w.keys for w in plan.batches(rows, every)] == wanted


tree_prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=8),  # a path of 12-token stretches
        st.integers(1, 40),  # expected output
        st.booleans(),  # an error row
        st.booleans(),  # has a stored answer
    ),
    max_size=30,
)


@settings(max_examples=examples(8, 20), deadline=None)
@given(tree=tree_prompts, rows_per_part=st.integers(1, 30))
def test_plan_properties(tree: list[Any], rows_per_part: int) -> None:
    rows = [
        bad_row(i) if bad else good_row(i, [t for step in path for t in [step] * 12] + [9], expected)
        for i, (path, expected, bad, _) in enumerate(tree)
    ]
    present = keys_in([row for row, (*_, there) in zip(rows, tree, strict=True) if there])
    folder = Path(tempfile.mkdtemp())
    try:
        answers = [*map(answer, present)]
        plan = plan_rows(folder / "a", rows, stored=answers, rows_per_part=rows_per_part)
        other = plan_rows(folder / "b", rows, stored=answers[::-1], threads=1)
        work, same = planned(plan), planned(other)
        nodes = pq.read_table(plan.prefixes).to_pylist()
    finally:
        shutil.rmtree(folder)
    missing = set(keys_in(rows)) - set(present)
    assert len(work) == len(missing)
    assert {row["key"] for row in work} == missing
    assert work == same
    by_key = {row["key"]: row["tokens"] for row in rows if row.get("key")}
    prompts = [by_key[row["key"]] for row in work]
    assert plan.shared_prefix_tokens == _shared(prompts)
    for depth in range(BLOCK, 100, BLOCK):
        heads = [tuple(prompt[:depth]) for prompt in prompts if len(prompt) > depth]
        runs = [head for head, _ in groupby(heads)]
        assert len(runs) == len(set(runs)), f"rows that share {depth} tokens are torn apart"
    _check_nodes(work, prompts, nodes)


def _shared(prompts: list[list[int]]) -> int:
    """Return the tokens beyond the nodes of the prompts' trie. A prompt's last token always runs and is no node."""
    heads = [tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt))]
    return len(heads) - len(set(heads))


def _check_nodes(work: list[dict[str, Any]], prompts: list[list[int]], nodes: list[dict[str, Any]]) -> None:
    """Check that each row's group is a prefix of its prompt, and that nodes count the rows below them."""
    users = dict.fromkeys(range(len(nodes)), 0)
    heads: dict[int, list[int]] = {}
    for row, prompt in zip(work, prompts, strict=True):
        node = row["prefix_group"]
        assert row["prefix_tokens"] == (0 if node is None else nodes[node]["prefix_tokens"])
        while node is not None:
            users[node] += 1
            head = prompt[: nodes[node]["prefix_tokens"]]
            assert heads.setdefault(node, head) == head
            node = nodes[node]["parent"]
    assert users == {node["node"]: node["users"] for node in nodes}


def test_a_shared_prefix_of_any_length_is_found(tmp_path: Path) -> None:
    head = [t % 900 for t in range(5000)]
    rows = [good_row(i, [*head[: 4990 + 4 * i], 1000 + i]) for i in range(4)]
    plan = plan_rows(tmp_path, rows)
    prefixes = [(p.prefix_tokens, p.users) for p in largest_prefixes(plan.prefixes, 9)]
    assert prefixes == [(4990, 4), (4994, 3), (4998, 2)]
    assert plan.shared_prefix_tokens == 3 * 4990 + 2 * 4 + 4


def test_the_largest_prefixes_come_with_those_above_them(tmp_path: Path) -> None:
    prompts = [
        [1] * 32 + [document] * 16 * document + [500 + question]
        for document in range(2, 6)
        for question in range(document)
    ]
    rows = [good_row(i, prompt) for i, prompt in enumerate(prompts)]
    plan = plan_rows(tmp_path, rows)
    found = largest_prefixes(plan.prefixes, 2)
    assert [(p.prefix_tokens, p.own_tokens, p.users) for p in found] == [(32, 32, 14), (112, 80, 5)]
    assert [p.saved_tokens for p in found] == [13 * 32, 4 * 80]
    assert [p.parent for p in found] == [None, found[0].node]
    tokens = TokenStore(tmp_path / "x" / "tokens" / "tokens.bin").read(found[1].token_offset, 112)
    assert tokens.tolist() == [1] * 32 + [5] * 80


def test_nodes_are_held_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [good_row(i, [*range(i % 23), 100 + i % 7, 200 + i]) for i in range(150)]
    plan = plan_rows(tmp_path / "a", rows)
    usual = [largest_prefixes(plan.prefixes, most) for most in (1, 9, 1000)]
    monkeypatch.setattr(prefixes, "_GROUP", 4)
    again = plan_rows(tmp_path / "b", rows)
    assert pq.read_table(again.prefixes).equals(pq.read_table(plan.prefixes))
    assert [largest_prefixes(again.prefixes, most) for most in (1, 9, 1000)] == usual
    assert sum(node.saved_tokens for node in usual[-1]) == plan.shared_prefix_tokens


def test_long_rows_are_taken_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [good_row(i, [*range(16 * (i % 7)), i], 1 + i % 5) for i in range(90)]
    usual = planned(plan_rows(tmp_path / "a", rows))
    monkeypatch.setattr(sorted_prompts, "_CHAIN_BYTES", 100)
    monkeypatch.setattr(sorted_prompts, "_ROWS", 7)
    monkeypatch.setattr(planner, "_PARAMS_BYTES", 200)
    plan = plan_rows(tmp_path / "b", rows)
    assert planned(plan) == usual
    with pq.ParquetFile(plan.path) as file:
        assert file.num_row_groups > 5


@pytest.mark.slow
def test_many_rows_plan_under_a_small_memory_limit(tmp_path: Path) -> None:
    rows = mixed_rows(200_000, distinct=100_000)
    plan = plan_rows(tmp_path, rows, rows_per_part=50_000, memory_limit="200MB")
    assert plan.to_run == len(keys_in(rows))


def test_errors_while_prompts_are_hashed_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be a signal, which DuckDB would report as a damaged file."""

    class Stopped(Exception):
        pass

    def stops(*_: Any) -> Any:
        raise Stopped

    monkeypatch.setattr(sorted_prompts, "read_together", stops)
    with pytest.raises(Stopped):
        plan_rows(tmp_path, mixed_rows(70, distinct=20))
