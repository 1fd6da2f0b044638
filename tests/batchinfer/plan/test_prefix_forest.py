"""Block hashes, the forest that they give, and the order that it gives, against what brute force says of them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.plan import requests
from batchinfer.plan.block_hashes import BLOCK, HASH_BYTES, block_hashes, shared_blocks
from batchinfer.plan.prefix_forest import ROOT, ForestBuilder, PrefixForest
from batchinfer.plan.run_order import depth_first

# A path is made of stretches of 5 tokens, which fill no whole blocks
paths = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=20), st.integers(1, 40)), min_size=1, max_size=40
)


def prompts_of(tree: list[tuple[list[int], int]]) -> list[np.ndarray]:
    rows = [[step for step in path for _ in range(5)] + [50 + i] * own for i, (path, own) in enumerate(tree)]
    return [np.array(row, np.int32) for row in rows]


def heads_of(prompt: np.ndarray) -> list[bytes]:
    """What a prompt's blocks cover, but for a block that ends with its last token."""
    return [prompt[:end].tobytes() for end in range(BLOCK, len(prompt), BLOCK)]


def in_order(prompts: list[np.ndarray], batch: int) -> tuple[list[np.ndarray], PrefixForest]:
    """The prompts sorted, and their forest, of which the builder learns so many prompts at a time."""
    pairs = sorted(zip(block_hashes(prompts), range(len(prompts)), strict=True))
    builder, before = ForestBuilder(), b""
    for start in range(0, len(pairs), batch):
        chains = [chain for chain, _ in pairs[start : start + batch]]
        builder.add(shared_blocks(chains, before).tolist())
        before = chains[-1]
    return [prompts[row] for _, row in pairs], builder.finished()


def brute_force(prompts: list[np.ndarray]) -> dict[bytes, tuple[int, bytes | None]]:
    """By prefix its users and its parent: prefixes that two or more begin with, where the number of users changes."""
    users: dict[bytes, set[int]] = defaultdict(set)
    for row, prompt in enumerate(prompts):
        for head in heads_of(prompt):
            users[head].add(row)
    longer = {
        head[: -4 * BLOCK]: len(rows) for head, rows in sorted(users.items(), key=lambda one: len(one[1]))
    }
    nodes = {
        head: len(rows) for head, rows in users.items() if len(rows) > 1 and longer.get(head, 0) < len(rows)
    }
    above = {head: [h for h in nodes if h != head and head.startswith(h)] for head in nodes}
    return {head: (count, max(above[head], key=len, default=None)) for head, count in nodes.items()}


@given(paths, st.integers(1, 50))
@settings(deadline=None, print_blob=True)
def test_the_forest_is_the_one_of_brute_force(tree, batch):
    prompts, forest = in_order(prompts_of(tree), batch)
    heads = [
        prompts[f][:d].tobytes() for f, d in zip(forest.first.tolist(), forest.depth.tolist(), strict=True)
    ]
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
    assert forest.saved.sum() == BLOCK * (len(everything) - len(set(everything)))


@given(paths, st.data())
@settings(deadline=None, print_blob=True)
def test_the_order_walks_the_forest_by_effort(tree, data):
    prompts, forest = in_order(prompts_of(tree), 1000)
    effort = np.array([data.draw(st.integers(0, 9)) for _ in prompts], np.int64)
    places = depth_first(forest, effort).tolist()
    assert sorted(places) == list(range(len(prompts)))
    assert [row for _, row in sorted(zip(places, range(len(prompts)), strict=True))] == walk(
        list(range(len(prompts))), prompts, effort.tolist(), 0
    )


def walk(rows: list[int], prompts: list[np.ndarray], effort: list[int], depth: int) -> list[int]:
    """By recursion: the parts of these rows that differ in the block at `depth`, by largest effort."""
    parts: dict[bytes | int, list[int]] = defaultdict(list)
    for row in rows:
        whole = len(prompts[row]) > depth + BLOCK
        parts[prompts[row][depth : depth + BLOCK].tobytes() if whole else row].append(row)
    ordered = sorted(parts.values(), key=lambda part: (-max(effort[row] for row in part), part[0]))
    return [
        row
        for part in ordered
        for row in (part if len(part) == 1 else walk(part, prompts, effort, depth + BLOCK))
    ]


def test_many_tokens_are_hashed_in_pieces_that_change_nothing():
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 50_000, n).astype(np.int32) for n in (0, 1, 16, 17, 200_000, 33, 300_000, 48)]
    alone = [block_hashes([prompt])[0] for prompt in prompts]
    assert block_hashes(prompts) == alone
    assert [len(chain) for chain in alone] == [max(0, len(p) - 1) // BLOCK * HASH_BYTES for p in prompts]


def test_no_prompts_give_no_hashes_and_no_nodes():
    assert block_hashes([]) == []
    assert len(ForestBuilder().finished()) == 0


def test_blocks_whose_tokens_changed_places_are_not_the_same():
    a, b = [7] * 16, [9] * 16
    chains = block_hashes([np.array([*x, *y, 1], np.int32) for x, y in ((a, b), (b, a), (a, a), (b, b))])
    assert len({chain[HASH_BYTES:] for chain in chains}) == 4


def test_a_very_deep_chain_of_prefixes():
    prompts, forest = in_order([np.zeros(16 * n + 1, np.int32) for n in range(1, 600)], 1000)
    assert len(forest) == 598
    assert forest.users.tolist() == list(range(599, 1, -1))
    effort = np.array([len(prompt) for prompt in prompts])
    assert sorted(depth_first(forest, effort).tolist()) == list(range(599))


class Counted:
    """A token store that counts how often it is read."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.reads = tokens, 0

    def read(self, offset: int, count: int) -> np.ndarray:
        self.reads += 1
        return self.tokens[offset : offset + count]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=30), st.integers(1, 40))
@settings(deadline=None)
def test_prompts_that_lie_together_are_read_together(rows, at_once):
    """Rows of so many tokens, each so far behind the one before it."""
    counts = np.array([count for count, _ in rows], np.int32)
    gaps = np.array([gap for _, gap in rows], np.int64)
    offsets = np.cumsum(counts + gaps) - counts
    store = Counted(np.arange(int(counts.sum() + gaps.sum()), dtype=np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "_AT_ONCE", at_once)
        found = [prompt for some in requests.read_prompts(store, offsets, counts) for prompt in some]
    wanted = [
        store.tokens[o : o + c].tolist() for o, c in zip(offsets.tolist(), counts.tolist(), strict=True)
    ]
    assert [prompt.tolist() for prompt in found] == wanted
    assert store.reads <= 1 + np.count_nonzero(gaps[1:]) + counts.sum() // at_once
