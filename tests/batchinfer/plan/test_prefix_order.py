"""Rows that share a prefix become neighbours, whatever the ladder of prefix columns could see."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.plan.prefix_order import STEP, common_prefix, prefix_order, shared_with_next


def prompts_of(paths: list[list[int]], own: list[int]) -> list[np.ndarray]:
    """A path is made of stretches of 5 tokens, which fill no whole steps."""
    rows = [
        [step for step in path for _ in range(5)] + [50 + i] * n
        for i, (path, n) in enumerate(zip(paths, own, strict=True))
    ]
    return [np.array(row, np.int32) for row in rows]


trees = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=14), st.integers(1, 40)), min_size=1, max_size=40
)


@given(trees)
@settings(deadline=None, print_blob=True)
def test_every_whole_step_that_is_shared_is_shared_by_neighbours(tree):
    prompts = prompts_of([path for path, _ in tree], [own for _, own in tree])
    order = prefix_order(prompts)
    assert sorted(order) == list(range(len(prompts)))
    for depth in range(STEP, max(map(len, prompts)) + 1, STEP):
        heads = [prompts[i][:depth].tobytes() for i in order if len(prompts[i]) >= depth]
        runs = [head for head, _ in groupby(heads)]
        assert len(runs) == len(set(runs)), f"{depth} tokens are shared by rows that lie apart"


@given(trees)
@settings(deadline=None, print_blob=True)
def test_a_group_stands_where_its_first_row_stood(tree):
    prompts = prompts_of([path for path, _ in tree], [own for _, own in tree])
    order = prefix_order(prompts)
    heads = [prompts[i][:STEP].tobytes() if len(prompts[i]) >= STEP else bytes([i]) for i in order]
    firsts = [order[heads.index(head)] for head in dict.fromkeys(heads)]
    assert firsts == sorted(firsts)
    assert order[0] == 0


def test_rows_without_anything_in_common_stay_where_they_are():
    prompts = [np.array([i] * 40, np.int32) for i in range(50)]
    assert prefix_order(prompts) == list(range(50))


def test_a_very_deep_chain_of_prefixes():
    prompts = [np.zeros(16 * n + 1, np.int32) for n in range(1, 600)]
    assert sorted(prefix_order(prompts)) == list(range(599))


def test_common_prefixes():
    rows = [np.array(r, np.int32) for r in ([1, 2, 3], [1, 2, 3, 4], [1, 9], [7])]
    assert shared_with_next(rows) == [3, 1, 0]
    assert common_prefix(rows[0], rows[0]) == 3
