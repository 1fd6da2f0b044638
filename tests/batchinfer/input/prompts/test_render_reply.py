"""A reply contains the prepared rows. A forged reply is refused, or stays within its bounds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.errors import Unavailable
from batchinfer.core.reasoning import CLOSED, NO_MARKER, OPEN
from batchinfer.core.request import RowError
from batchinfer.input.prompts.prepared.rows import (
    FurtherPrompts,
    PreparedPrompts,
    PreparedRows,
    PreparedRungs,
)
from batchinfer.input.prompts.render_reply import BadReply, parse_reply, serialize_failure, serialize_reply
from batchinfer.input.prompts.row_facts import FactsCollector, RowFields

FIELDS = RowFields(("text",), "id", ("label",), as_json=True, endpoints=True, watched=frozenset({"id", "no"}))
VOCAB = 100


def some_rows() -> PreparedRows:
    facts = FactsCollector(FIELDS)
    facts.note({"id": "ä", "label": [1], "url": "/v1"})
    facts.note(RowError("bad_json", "input", "line 2"))
    facts.note({"id": None, "label": None, "text": ""})
    int32s = [np.array(column, np.int32) for column in ([0, 0, 1], [9, 0, 4], [2, 0, 1])]
    errors = {1: RowError("bad_json", "input", "line 2")}
    tokens, openings = np.array([1, 99, 3], np.int32), np.array([OPEN, NO_MARKER, CLOSED], np.int8)
    rung = PreparedRungs(
        np.array([1, -1, -1], np.int32), np.array([7, 0, 0], np.int32), b"k" * 32 + bytes(64)
    )
    params, work = ["{}", '{"seed":1}'], (bytes(96), tokens, openings, {"unread": 2}, [rung])
    whose, counts, more = (np.array(one, np.int32) for one in ([0, 0], [1, 2], [4, 5, 6]))
    further = FurtherPrompts(whose, counts, b"f" * 64, more)
    prompts = PreparedPrompts(
        errors, params, *int32s, *work,
        samples=np.array([3, 0, 1024], np.int32), dimensions=np.array([0, 0, 7], np.int32), further=further,
    )  # fmt: skip
    return PreparedRows(prompts, facts.finish())


def consistent(rows: PreparedRows) -> bool:
    prompts, facts = rows.prompts, rows.facts
    for column in (facts.ids, facts.endpoints, *facts.carried):
        column.validate(full=True)
        assert len(column) == len(rows)
    numbers = set(prompts.params_of.tolist())
    assert numbers <= set(range(max(1, len(prompts.params))))
    assert len(prompts.tokens) == prompts.counts.sum()
    assert not len(prompts.tokens) or 0 <= prompts.tokens.min() <= prompts.tokens.max() < VOCAB
    assert len(prompts.keys) == 32 * len(rows)
    assert prompts.samples is None or len(prompts.samples) == len(rows)
    assert prompts.answers(1).min(initial=1) >= 1
    assert prompts.answers(1).max(initial=1) <= 2048
    more = prompts.further
    assert len(more.keys) == 32 * len(more)
    assert len(more.tokens) == more.counts.sum()
    assert not len(more.tokens) or 0 <= more.tokens.min() <= more.tokens.max() < VOCAB
    for row, times in Counter(more.rows.tolist()).items():
        assert prompts.counts[row] > 0
        assert times + 1 == prompts.answers(1)[row]
    assert prompts.dimensions is None or len(prompts.dimensions) == len(rows)
    (rung,) = prompts.rungs
    assert set(rung.params_of.tolist()) <= {-1, *range(len(prompts.params))}
    assert (len(rung.keys), len(rung.max_tokens)) == (32 * len(rows), len(rows))
    assert (rung.params_of[prompts.counts == 0] == -1).all()
    assert set(prompts.openings.tolist()) <= {NO_MARKER, OPEN, CLOSED}
    assert len(prompts.openings) == len(rows)
    return set(prompts.errors) == set(np.flatnonzero(prompts.counts == 0).tolist())


def test_a_reply_contains_the_prepared_rows() -> None:
    made, found = some_rows(), parse_reply(serialize_reply(some_rows()), FIELDS, VOCAB, 1)
    assert consistent(found)
    assert found.prompts.errors == made.prompts.errors
    assert found.prompts.tokens.tolist() == made.prompts.tokens.tolist()
    assert found.prompts.answers(2).tolist() == [3, 2, 1024]
    assert found.prompts.dimensions.tolist() == [0, 0, 7]
    more = found.prompts.further
    assert (more.rows.tolist(), more.counts.tolist(), more.tokens.tolist()) == ([0, 0], [1, 2], [4, 5, 6])
    assert found.prompts.keys_of_new_work() == bytes(64) + b"f" * 64
    (rung,) = found.prompts.rungs
    assert (rung.params_of.tolist(), rung.max_tokens.tolist()) == ([1, -1, -1], [7, 0, 0])
    assert rung.keys == made.prompts.rungs[0].keys
    assert found.facts.ids.to_pylist() == ["ä", None, None]
    assert found.facts.endpoints.to_pylist() == ["/v1", None, None]
    assert found.facts.carried[0].to_pylist() == ["[1]", None, None]
    assert found.facts.kinds == [{"json", "null"}]
    assert (found.facts.unread, found.facts.names, found.facts.found) == (
        [1],
        ["id", "label", "url", "text"],
        {"id"},
    )


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 40),
)
def test_a_forged_reply_is_refused_or_consistent(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(serialize_reply(some_rows()))
    for at, byte in changes:
        data[at % len(data)] = byte
    try:
        rows = parse_reply(bytes(data[: len(data) - cut]), FIELDS, VOCAB, 1)
    except (BadReply, Unavailable):
        return
    assert consistent(rows)


def test_a_worker_that_cannot_work_says_why() -> None:
    with pytest.raises(Unavailable, match="too many processes"):
        parse_reply(serialize_failure("too many processes"), FIELDS, VOCAB)
