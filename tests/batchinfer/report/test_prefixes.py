"""The tree of shared prefixes equals the one that a trie of all prompts has, and splitting their time loses none."""

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
from batchinfer.report.tables.prefixes import NONE, PrefixNodes, PrefixTree

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=12)


def requests_of(rows: list[list[int]]) -> list[Request]:
    """In the order in which equal beginnings stand together."""
    ids = [np.array(row, np.int32) for row in sorted(rows)]
    shared = [common_prefix(row, after) for row, after in pairwise(ids)]
    return [
        Request(bytes([at]) * 32, row, SamplingParams(), common)
        for at, (row, common) in enumerate(zip(ids, [*shared, 0], strict=True))
    ]


def tree_of(requests: list[Request]) -> tuple[PrefixNodes, list[int]]:
    tree = PrefixTree()
    nodes = [tree.add(request) for request in requests]
    return tree.close(), [NONE if node is None else node for node in nodes]


def users_by_prefix(requests: list[Request]) -> dict[tuple[int, ...], int]:
    """Of each prefix that a request may share, how many begin with it."""
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for request in requests:
        for end in range(1, len(request.prompt)):
            found[tuple(request.prompt[:end].tolist())] += 1
    return found


@given(rows=prompts)
def test_saved_tokens_are_those_of_a_trie(
    rows: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    requests = requests_of(rows)
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
def test_splitting_the_time_of_prefixes_loses_none(rows: list[list[int]]) -> None:
    """The first request of a prefix runs it, the others find it in the cache."""
    requests = requests_of(rows)
    nodes, prefix = tree_of(requests)
    seen: set[tuple[int, ...]] = set()
    cached = []
    for request in requests:
        own = [tuple(request.prompt[:end].tolist()) for end in range(1, len(request.prompt))]
        cached.append(sum(one in seen for one in own))
        seen.update(own)
    columns = {
        "prompt_tokens": np.array([len(r.prompt) for r in requests], float),
        "cached_tokens": np.array(cached, float),
        "prefix": np.array(prefix, float),
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
    nodes, prefix = tree_of(requests_of([[1, 1, 1], [2, 2, 2]]))
    assert prefix == [NONE, NONE]
    columns = {"prompt_tokens": np.ones(2), "cached_tokens": np.zeros(2), "prefix": np.array(prefix, float)}
    assert nodes.shared(columns, np.array([3.0, 4.0])).tolist() == [3.0, 4.0]
    assert pq.read_table(nodes.write(tmp_path, "r")).num_rows == 0
