"""Tests that the pieces of a batch do not change the prepared rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.request import RowError
from batchinfer.input.prompts.prepared.rows import (
    FurtherPrompts,
    PreparedPrompts,
    PreparedRows,
    PreparedRungs,
)
from batchinfer.input.prompts.render_pieces import RowPieces, join_rows
from batchinfer.input.prompts.row_facts import FactsCollector, RowFields

SHORT = RowError("template_memory", "resource", "", retryable=False)
BAD = RowError("template_error", "bad_input", "", retryable=False)


FIELDS = RowFields((), "id")


def prepared(rows: list[str]) -> PreparedRows:
    """Prepare rows as a worker does. Parameters are listed once, in order of first use."""
    errors = {at: BAD for at, row in enumerate(rows) if row == "!"}
    good = [row for row in rows if row != "!"]
    params = list(dict.fromkeys(row[0] for row in good))
    lengths = np.array([0 if row == "!" else len(row) for row in rows], np.int32)
    prompts = PreparedPrompts(
        errors,
        params,
        np.array([0 if row == "!" else params.index(row[0]) for row in rows], np.int32),
        lengths,
        lengths,
        b"".join(bytes(32) if row == "!" else row.encode().ljust(32) for row in rows),
        np.frombuffer("".join(good).encode(), np.uint8).astype(np.int32),
        (lengths % 3).astype(np.int8),
    )
    keys = b"".join(row.upper().encode().ljust(32) for row in rows)
    params_of = np.array([params.index(row[0]) if len(row) > 1 else -1 for row in rows], np.int32)
    if "bcd" in rows:
        prompts.samples = np.array([3 if row == "bcd" else 0 for row in rows], np.int32)
        prompts.dimensions = np.array([len(row) if row == "bcd" else 0 for row in rows], np.int32)
        whose = np.repeat([at for at, row in enumerate(rows) if row == "bcd"], 2).astype(np.int32)
        counts = np.array([1, 2] * (len(whose) // 2), np.int32)
        tokens = np.arange(counts.sum(), dtype=np.int32) % 3
        own = b"".join(b"%32d" % at for at in range(2)) * (len(whose) // 2)
        prompts.further = FurtherPrompts(whose, counts, own, tokens)
    prompts.rungs = [PreparedRungs(params_of, lengths + 1, keys)]
    facts = FactsCollector(FIELDS)
    for row in rows:
        facts.note({"id": row})
    return PreparedRows(prompts, facts.finish())


def told(rows: PreparedRows) -> list[Any]:
    """Return the comparable parts of prepared rows."""
    prompts, further = rows.prompts, rows.prompts.further
    arrays = [prompts.counts, prompts.tokens, prompts.params_of, prompts.max_tokens, prompts.openings]
    arrays += [prompts.answers(2), further.rows, further.counts, further.tokens]
    arrays += [one for rung in prompts.rungs for one in (rung.params_of, rung.max_tokens)]
    keys = [prompts.keys, further.keys, *(rung.keys for rung in prompts.rungs)]
    plain = [prompts.errors, prompts.params, str(prompts.dimensions), rows.facts.ids.to_pylist()]
    return [*plain, *keys, *(array.tolist() for array in arrays)]


ROWS = st.lists(st.sampled_from(["!", "a", "ab", "b", "bcd", "c"]), max_size=12)


@given(ROWS, st.data())
def test_pieces_join_to_the_whole(rows: list[str], data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *borders, len(rows)]
    pieces = [prepared(rows[a:b]) for a, b in pairwise(bounds)]
    assert told(join_rows(pieces)) == told(prepared(rows))


@given(ROWS.filter(bool), st.data())
def test_only_rows_that_end_processes_again_become_errors(rows: list[str], data: st.DataObject) -> None:
    """Accidents end up to four processes at any row. A row of `killers` ends each process that renders it, and one of
    `deadly` each that reads it. The chunk may have fewer rows than expected.
    """
    numbers = st.integers(0, len(rows) - 1)
    killers, accidents = data.draw(st.sets(numbers)), data.draw(st.lists(numbers, max_size=4, unique=True))
    deadly = data.draw(st.sets(st.sampled_from(sorted(killers)))) if killers else set()
    pieces = RowPieces(len(rows) + data.draw(st.integers(0, 2)), FIELDS)
    while pieces:
        piece = pieces.present
        ends = [at for at in range(piece.start, piece.stop) if at in killers or at in accidents]
        if piece.given is not None:
            ends = [at for at in ends if at in deadly]
        if not ends:
            reply = prepared(rows[piece.start : piece.stop])
            if piece.given is not None:
                reply = PreparedRows(prepared(["!"]).prompts, reply.facts)
                reply.prompts.errors = {0: piece.given}
            assert pieces.fits(len(reply))
            assert pieces.done(reply)
            continue
        if ends[0] in accidents:
            accidents.remove(ends[0])
        if piece.accused:
            pieces.fail_row("template_crash", "")
        else:
            pieces.isolate_row(ends[0] - piece.start)
    found = pieces.join()
    blamed = {at for at, error in found.prompts.errors.items() if error.code == "template_crash"}
    assert blamed == killers
    expected = prepared(["!" if at in killers else row for at, row in enumerate(rows)])
    assert np.array_equal(found.prompts.tokens, expected.prompts.tokens)
    ids = [None if at in deadly else row for at, row in enumerate(rows)]
    assert found.facts.ids.to_pylist() == ids


def test_a_row_that_ran_out_of_memory_is_prepared_again_alone() -> None:
    short = prepared(["a", "!", "b"])
    short.prompts.errors = {1: SHORT}
    pieces = RowPieces(3, FIELDS)
    assert not pieces.done(short)
    bounds = []
    for row in ("a", "ab", "b"):
        bounds.append((pieces.present.start, pieces.present.stop, pieces.present.accused))
        assert pieces.done(prepared([row]))
    assert bounds == [(0, 1, False), (1, 2, True), (2, 3, False)]
    assert told(pieces.join()) == told(prepared(["a", "ab", "b"]))
