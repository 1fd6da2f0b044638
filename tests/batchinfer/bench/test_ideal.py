"""Costs of the ideal job, compared with a count token by token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.bench.ideal import attended, ideal_costs, ideal_job, prefix_nodes
from batchinfer.bench.workloads import Row, distinct, make_workload
from batchinfer_kernels.cost import StepShape
from tests.examples import examples
from tests.model_costs import llama_cost

SHAPE = llama_cost(2, 64, 128, 4, 2, 16, 512, 2, 2)
ROWS = st.lists(
    st.builds(Row, st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), st.integers(1, 5)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=examples(25, 300), deadline=None)
@given(ROWS)
def test_prompt_tokens_are_those_of_the_trie(rows):
    """Each distinct prefix counts once. Equal prompts with different outputs add the last token of each."""
    prefixes = {row.prompt[:end] for row in rows for end in range(1, len(row.prompt) + 1)}
    once = set(rows)
    twins = len(once) - len({row.prompt for row in once})
    assert ideal_job(rows, [None]).prefill_tokens == len(prefixes) + twins


@settings(max_examples=examples(25, 300), deadline=None)
@given(ROWS)
def test_a_prefix_is_read_as_often_as_its_longest_reader_needs(rows):
    """Rows have no duplicates: each token of the trie is part of a prefix."""
    once = list({row.prompt: row for row in rows}.values())
    longest: dict[tuple[int, ...], int] = {}
    for row in once:
        for end in range(1, len(row.prompt) + 1):
            longest[row.prompt[:end]] = max(longest.get(row.prompt[:end], 0), row.max_tokens)
    own = sum(sum(range(1, row.max_tokens)) for row in once)
    assert ideal_job(once, [None]).kv_tokens == sum(longest.values()) + own


@settings(max_examples=examples(25, 200), deadline=None)
@given(ROWS, st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=3))
def test_pairs_are_what_each_token_sees(rows, windows):
    once = list({row.prompt: row for row in rows}.values())
    prefixes = {row.prompt[:end] for row in once for end in range(1, len(row.prompt) + 1)}
    seen = [len(prefix) for prefix in prefixes]
    seen += [len(row.prompt) + at for row in once for at in range(1, row.max_tokens)]
    expected = sum(min(length, window or length) for window in windows for length in seen)
    assert ideal_job(once, windows).pairs == expected


@given(st.integers(0, 30), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 40)))
def test_attended_pairs_add_up(start, length, window):
    end = start + length
    assert attended(start, end, window) == sum(min(at + 1, window or at + 1) for at in range(start, end))


@settings(max_examples=examples(25, 100), deadline=None)
@given(ROWS)
def test_nodes_cover_each_prompt_without_gaps(rows):
    once = distinct(rows)
    nodes = list(prefix_nodes(once))
    assert all(0 <= node.start < node.end for node in nodes)
    ends = {node.end for node in nodes} | {0}
    assert all(node.start in ends for node in nodes)
    assert {len(row.prompt) for row in once} <= ends


@settings(max_examples=examples(25, 50), deadline=None)
@given(ROWS, st.integers(1, 5))
def test_duplicates_cost_nothing(rows, times):
    assert ideal_job(rows * times, [None, 3]) == ideal_job(rows, [None, 3])


def test_one_row_alone_costs_its_steps():
    """A prompt of 4 tokens and 3 outputs: a prefill and two decode steps, whose costs add up."""
    ideal = ideal_job([Row((1, 2, 3, 4), 3)], [None, None])
    steps = [StepShape(4, 1, 2 * 10, 2 * 4), StepShape(1, 1, 2 * 5, 2 * 5), StepShape(1, 1, 2 * 6, 2 * 6)]
    added = [SHAPE.step(step) for step in steps]
    assert ideal_costs(ideal, SHAPE) == {
        name: cost + added[1][name] + added[2][name] for name, cost in added[0].items()
    }


@pytest.mark.parametrize("name", ["shared-prefix", "prefix-tree"])
def test_a_shared_prefix_is_run_once(name):
    workload = make_workload(name, 32_000)
    found = ideal_job(workload.rows, [None])
    if name == "prefix-tree":
        own = sum(len(row.prompt) - 64 - 256 for row in workload.rows)
        assert found.prefill_tokens == 64 + 16 * 256 + own
    else:
        own = sum(len(row.prompt) - 512 for row in workload.rows)
        assert 512 + own - 5 <= found.prefill_tokens <= 512 + own  # a few begin alike by chance
