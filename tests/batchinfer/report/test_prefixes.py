"""The tree of shared prefixes equals a trie of all prompts, and their times add up."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.request import Request, common_prefix
from batchinfer.core.sampling import SamplingParams
from batchinfer.report.tables.prefixes import PrefixNodes, PrefixTree

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def requests_of(rows: list[list[int]]) -> list[Request]:
    ids = [np.array(row, np.int32) for row in rows]
    shared = [common_prefix(row, after) for row, after in pairwise(ids)]
    return [
        Request(bytes([at]) * 32, row, SamplingParams(), common)
        for at, (row, common) in enumerate(zip(ids, [*shared, 0], strict=True))
    ]


def tree_of(requests: list[Request]) -> tuple[PrefixNodes, np.ndarray]:
    """Return the tree, and the positions of the requests in it."""
    tree = PrefixTree()
    places = np.array([tree.add(request) for request in requests], float)
    return tree.close(), places


def users_by_prefix(requests: list[Request]) -> dict[tuple[int, ...], int]:
    """Return for each prefix that a request may share the number of requests that begin with it."""
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for request in requests:
        for end in range(1, len(request.prompt)):
            found[tuple(request.prompt[:end].tolist())] += 1
    return found


@given(rows=prompts)
def test_saved_tokens_are_those_of_a_trie(
    rows: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests = requests_of(sorted(rows))
    nodes, _ = tree_of(requests)
    table = pq.read_table(nodes.write(tmp_path_factory.mktemp("prefixes"), "r")).to_pylist()
    by_prefix = users_by_prefix(requests)
    assert sum(row["saved_tokens"] for row in table) == sum(users - 1 for users in by_prefix.values())
    first = {request.key.hex(): request.prompt.tolist() for request in requests}
    for row in table:
        assert row["users"] == by_prefix[tuple(first[row["first_key"]][: row["depth"]])] > 1
    depths = {row["prefix"]: row["depth"] for row in table}
    assert all(row["depth"] - row["tokens"] == depths.get(row["parent"], 0) for row in table)


@given(rows=prompts)
def test_in_any_order_requests_save_what_they_share_with_the_one_before(
    rows: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests = requests_of(rows)
    nodes, places = tree_of(requests)
    table = pq.read_table(nodes.write(tmp_path_factory.mktemp("prefixes"), "r")).to_pylist()
    shared = [common_prefix(one.prompt[:-1], after.prompt[:-1]) for one, after in pairwise(requests)]
    assert sum(row["saved_tokens"] for row in table) == sum(shared)
    depths = {row["prefix"]: row["depth"] for row in table}
    deepest = [max(both) for both in zip([0, *shared], [*shared, 0], strict=True)]
    assert [depths.get(name, 0) for name in nodes.names(places).to_pylist()] == deepest


@given(rows=prompts)
def test_times_of_prefixes_add_up(rows: list[list[int]]) -> None:
    """The first request of a prefix computes it, later ones find it in the cache."""
    requests = requests_of(sorted(rows))
    nodes, places = tree_of(requests)
    seen: set[tuple[int, ...]] = set()
    cached = []
    for request in requests:
        own = [tuple(request.prompt[:end].tolist()) for end in range(1, len(request.prompt))]
        cached.append(sum(one in seen for one in own))
        seen.update(own)
    columns = {
        "prompt_tokens": np.array([len(r.prompt) for r in requests], float),
        "cached_tokens": np.array(cached, float),
        "place": places,
    }
    seconds = columns["prompt_tokens"] - columns["cached_tokens"]  # a token takes a second
    nodes.count(columns, seconds)
    split = nodes.shared(columns, seconds)
    assert split.sum() == pytest.approx(seconds.sum())
    expected = []
    for request in requests:
        users = users_by_prefix(requests)
        own = [tuple(request.prompt[:end].tolist()) for end in range(1, len(request.prompt))]
        alone = len(request.prompt) - len(own)
        expected.append(alone + sum(1 / users[one] for one in own))
    assert split.tolist() == pytest.approx(expected)


def test_a_request_that_shares_nothing_keeps_its_time(tmp_path: Path) -> None:
    nodes, places = tree_of(requests_of([[1, 1, 1], [2, 2, 2]]))
    assert nodes.names(places).to_pylist() == [None, None]
    columns = {"prompt_tokens": np.ones(2), "cached_tokens": np.zeros(2), "place": places}
    assert nodes.shared(columns, np.array([3.0, 4.0])).tolist() == [3.0, 4.0]
    assert pq.read_table(nodes.write(tmp_path, "r")).num_rows == 0
