"""The forest of shared prefixes and its order, compared with brute force."""

from __future__ import annotations

from collections import defaultdict

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.prefix_forest import ROOT, PrefixForest, prefix_forest
from batchinfer.plan.order import requests, run_order
from batchinfer.plan.order import sorted_prompts as sorting
from batchinfer.plan.order.block_hashes import BLOCK, block_hashes
from batchinfer.plan.order.run_order import depth_first, kept_together
from tests.examples import examples

ROOTS = np.zeros(9, np.uint64)
# A path is made of stretches of 5 tokens, which fill no whole blocks
path = st.lists(st.integers(0, 1), max_size=20)
paths = st.lists(st.tuples(path, st.integers(1, 40)), min_size=1, max_size=40)


def prompts_of(tree: list[tuple[list[int], int]]) -> list[np.ndarray]:
    rows = [[step for step in path for _ in range(5)] + [50 + i] * own for i, (path, own) in enumerate(tree)]
    return [np.array(row, np.int32) for row in rows]


def heads_of(prompt: np.ndarray) -> list[bytes]:
    """Return the prefixes that a prompt may share: without its last token, which always runs."""
    return [prompt[:end].tobytes() for end in range(1, len(prompt))]


def in_order(prompts: list[np.ndarray], batch: int) -> tuple[list[np.ndarray], PrefixForest]:
    """Return the prompts in order, and their forest. `batch`: prompts in memory at a time."""
    counts = [len(prompt) for prompt in prompts]
    places = pa.table({"token_offset": np.cumsum(counts) - counts, "token_count": np.array(counts, np.int32)})
    roots = np.zeros(len(prompts), np.uint64)
    with duckdb.connect() as database, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_ROWS", batch)
        database.register("places", places)
        database.execute("CREATE TABLE work AS SELECT * FROM places")
        forest, rows = sorting.sorted_prompts(database, Counted(np.concatenate(prompts)), roots)
    assert rows.tolist() == sorted(range(len(prompts)), key=lambda row: (prompts[row][:-1].tolist(), row))
    return [prompts[row] for row in rows], forest


def brute_force(prompts: list[np.ndarray]) -> dict[bytes, tuple[int, bytes | None]]:
    """Return users and parent of each prefix of two or more prompts at which the number of users changes."""
    users: dict[bytes, set[int]] = defaultdict(set)
    for row, prompt in enumerate(prompts):
        for head in heads_of(prompt):
            users[head].add(row)
    longer = {head[:-4]: len(rows) for head, rows in sorted(users.items(), key=lambda one: len(one[1]))}
    nodes = {
        head: len(rows) for head, rows in users.items() if len(rows) > 1 and longer.get(head, 0) < len(rows)
    }
    above = {head: [h for h in nodes if h != head and head.startswith(h)] for head in nodes}
    return {head: (count, max(above[head], key=len, default=None)) for head, count in nodes.items()}


@given(paths, st.integers(1, 50))
@settings(max_examples=examples(13, 40), deadline=None, print_blob=True)
def test_the_forest_equals_brute_force(tree, batch):
    prompts, forest = in_order(prompts_of(tree), batch)
    ends = zip(forest.first.tolist(), forest.depth.tolist(), strict=True)
    heads = [prompts[first][:depth].tobytes() for first, depth in ends]
    found = {
        head: (users, None if parent == ROOT else heads[parent])
        for head, users, parent in zip(heads, forest.users.tolist(), forest.parent.tolist(), strict=True)
    }
    wanted = brute_force(prompts)
    assert found == wanted
    assert len(found) == len(forest)
    assert all(parent < node for node, parent in enumerate(forest.parent.tolist()))
    for prompt, node in zip(prompts, forest.node_of.tolist(), strict=True):
        deepest = max((h for h in heads_of(prompt) if h in wanted), key=len, default=None)
        assert deepest == (None if node == ROOT else heads[node])
    everything = [head for prompt in prompts for head in heads_of(prompt)]
    assert forest.saved.sum() == len(everything) - len(set(everything))


@pytest.mark.parametrize("many", [0, 1000])
@given(tree=paths, data=st.data())
@settings(max_examples=examples(10, 30), deadline=None, print_blob=True)
def test_the_order_walks_the_forest_by_effort(many, tree, data):
    prompts, forest = in_order(prompts_of(tree), 1000)
    effort = np.array([data.draw(st.integers(0, 9)) for _ in prompts], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_order, "MANY", many)
        places = depth_first(kept_together(forest), effort).tolist()
    assert sorted(places) == list(range(len(prompts)))
    step = BLOCK if many else 1
    rows = list(range(len(prompts)))
    ordered = [row for _, row in sorted(zip(places, rows, strict=True))]
    assert ordered == walk(rows, prompts, effort.tolist(), 0, step)


def walk(rows: list[int], prompts: list[np.ndarray], effort: list[int], depth: int, step: int) -> list[int]:
    """Order rows recursively: groups that differ in the next `step` tokens, the largest effort first."""
    parts: dict[bytes | int, list[int]] = defaultdict(list)
    for row in rows:
        whole = len(prompts[row]) > depth + step
        parts[prompts[row][depth : depth + step].tobytes() if whole else row].append(row)
    ordered = sorted(parts.values(), key=lambda part: (-max(effort[row] for row in part), part[0]))
    return [
        row
        for part in ordered
        for row in (part if len(part) == 1 else walk(part, prompts, effort, depth + step, step))
    ]


def chains_of(prompts: list[np.ndarray], roots: np.ndarray):
    counts = np.array([len(prompt) for prompt in prompts], np.int64)
    tokens = np.concatenate([np.zeros(0, np.int32), *prompts])
    return block_hashes(tokens, np.cumsum(counts) - counts, counts, roots)


def test_the_chain_of_a_prompt_does_not_depend_on_the_others():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 50_000, n).astype(np.int32) for n in (0, 1, 16, 17, 200_000, 33, 300_000, 48)]
    alone = [chains_of([prompt], ROOTS[:1]).hashes for prompt in prompts]
    chains = chains_of(prompts, ROOTS[: len(prompts)])
    assert chains.hashes.tolist() == np.concatenate(alone).tolist()
    assert chains.lengths.tolist() == [len(one) for one in alone]
    assert [len(one) for one in alone] == [max(0, len(p) - 1) // BLOCK for p in prompts]


def test_no_prompts_give_no_hashes_and_no_nodes():
    assert len(chains_of([], ROOTS[:0]).hashes) == 0
    assert len(prefix_forest(np.zeros(0, np.int32))) == 0


def test_blocks_whose_tokens_changed_places_are_not_the_same():
    a, b = [7] * 16, [9] * 16
    prompts = [np.array([*x, *y, 1], np.int32) for x, y in ((a, b), (b, a), (a, a), (b, b))]
    assert len(set(chains_of(prompts, ROOTS[:4]).hashes[1::2].tolist())) == 4


def test_a_very_deep_chain_of_prefixes():
    prompts, forest = in_order([np.zeros(16 * n + 1, np.int32) for n in range(1, 600)], 1000)
    assert len(forest) == 598
    assert forest.users.tolist() == list(range(599, 1, -1))
    effort = np.array([len(prompt) for prompt in prompts])
    assert sorted(depth_first(kept_together(forest), effort).tolist()) == list(range(599))


class Counted:
    """A token store that counts its reads."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.reads = tokens, 0

    def read(self, offset: int, count: int) -> np.ndarray:
        self.reads += 1
        return self.tokens[offset : offset + count]


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), max_size=30),
    gap=st.integers(0, 60),
    at_once=st.integers(1, 200),
)
@settings(deadline=None)
def test_adjacent_ranges_are_read_together(rows, gap, at_once):
    counts = np.array([count for count, _ in rows], np.int32)
    gaps = np.array([gap for _, gap in rows], np.int64)
    offsets = np.cumsum(counts + gaps) - counts
    end = int(counts.sum() + gaps.sum())
    store = Counted(np.arange(7, 7 + end, dtype=np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_GAP", gap)
        patch.setattr(requests, "_AT_ONCE", at_once)
        pieces = list(requests.read_together(store, offsets, counts))
        reads = store.reads
        tails = sorting.read_tails(store, offsets, counts.astype(np.int64))
    places = list(zip(offsets.tolist(), counts.tolist(), strict=True))
    wanted = [store.tokens[o : o + c].tolist() for o, c in places]
    found = [
        tokens[start : start + count].tolist()
        for some, tokens, starts in pieces
        for start, count in zip(starts.tolist(), counts[some].tolist(), strict=True)
    ]
    assert found == wanted
    heads = [[token - 1 for token in tail.tolist() if token] for tail in tails]
    assert heads == [prompt[:BLOCK] for prompt in wanted]
    assert reads <= 1 + np.count_nonzero(gaps[1:] > gap) + end // at_once
