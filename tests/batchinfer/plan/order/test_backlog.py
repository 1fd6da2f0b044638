"""Dividing the rows of a plan among engines."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.plan.order.backlog import DIVIDES_AT, Backlog, choose_split, piece_rows, share_of, tokens_of


def rows(*groups: tuple[int, int, int]) -> list[Request]:
    """Return rows in groups of (rows, shared tokens, further tokens per row), in this order."""
    made = []
    for members, shared, own in groups:
        for member in range(members):
            prompt = np.zeros(shared + own, np.int32)
            key = len(made).to_bytes(32, "big")
            shares_next = shared if member < members - 1 else 0
            made.append(Request(key, prompt, SamplingParams(max_tokens=1), shares_next))
    return made


GROUPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500), st.integers(1, 60)), max_size=12)


def tokens(requests: list[Request]) -> int:
    shared = sum(before.shares_next for before, _ in pairwise(requests))
    return sum(len(request.prompt) + request.params.max_tokens for request in requests) - shared


@given(groups=GROUPS, wanted=st.integers(0, 70), engines=st.integers(1, 5))
def test_splits_lose_no_row_and_are_cheap(
    groups: list[tuple[int, int, int]], wanted: int, engines: int
) -> None:
    requests, backlog, taken = rows(*groups), Backlog(), []
    backlog.append(requests)
    while len(backlog):
        end = len(taken)
        piece = backlog.take(wanted, engines)
        taken += piece
        assert piece
        assert len(taken) == len(requests) or len(piece) >= wanted
        assert piece[-1].shares_next == 0
        divided = requests[len(taken) - 1].shares_next
        # tokens of the divided prefix that the previous piece may have computed already
        shared = [request.shares_next for request in requests[end : len(taken)]]
        free_tokens = min([requests[end - 1].shares_next if end else 0, *shared])
        rest = range(len(taken), len(requests))
        last = next((at for at in rest if requests[at].shares_next < divided), len(taken))
        group = tokens(requests[end : last + 1]) // max(1, engines - 1)
        assert (divided - free_tokens) * DIVIDES_AT <= max(tokens(requests[end : len(taken)]), group)
    assert [request.key for request in taken] == [request.key for request in requests]


def test_rows_that_share_nothing_are_split_off_as_wanted() -> None:
    assert choose_split(rows(*[(1, 0, 20)] * 100), 30, 2)[0] == 30


def test_a_group_is_kept_whole() -> None:
    assert choose_split(rows((25, 300, 10), (10, 300, 10), (30, 300, 10)), 30, 2)[0] == 35


def test_a_group_inside_a_group_is_kept_whole() -> None:
    """All rows share a prefix. The longer prefix of an inner group is computed once."""
    requests = rows(*[(8, 40, 400)] * 10)
    linked = [Request(r.key, r.prompt, r.params, r.shares_next or 10) for r in requests]
    assert choose_split(linked, 30, 2)[0] == 32


def test_a_large_group_is_divided_where_its_prefix_costs_little() -> None:
    requests = rows((128, 512, 80))
    assert choose_split(requests, 16, 2) == (16, 512)
    assert choose_split(requests, 16, 20) == (64, 0)
    assert tokens(requests[:64]) >= 512 * DIVIDES_AT
    assert choose_split(requests[:40], 16, 2) == (40, 0)
    assert choose_split(requests[:40], 16, 2, free_tokens=512) == (16, 512)


def test_prefixes_that_engines_already_computed_cost_nothing_again() -> None:
    """The first half is divided because it is large enough. The last rows are divided evenly."""
    backlog, pieces = Backlog(), []
    backlog.append(rows((128, 512, 80)))
    while len(backlog):
        pieces.append(len(backlog.take(piece_rows(len(backlog), 2), 2)))
    assert max(pieces) == 16
    assert pieces[-1] == 1


def test_rows_that_come_back_are_first() -> None:
    backlog, requests = Backlog(), rows((3, 0, 5))
    backlog.append(requests[1:])
    backlog.put_back(requests[:1])
    assert [request.key for request in backlog.take_all()] == [request.key for request in requests]
    assert not len(backlog)


def test_finding_the_share_of_the_busiest_engine_reads_each_row_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each row of 25,000 was once read 50 times."""
    many, looked_at, take = rows(*[(4, 16, 16)] * 3_000), [0], Backlog.take

    def counted(backlog: Backlog, most: int, engines: int) -> list[Request]:
        looked_at[0] += len(backlog)
        return take(backlog, most, engines)

    monkeypatch.setattr(Backlog, "take", counted)
    share = share_of(many, 2)
    assert len(many) // 2 < looked_at[0] < 10 * len(many)
    assert sum(map(tokens_of, share)) == pytest.approx(sum(map(tokens_of, many)) / 2, rel=0.01)
    assert share_of(many, 1) == many
    assert [request.key for request in share_of(many[:1], 3)] == [many[0].key]
