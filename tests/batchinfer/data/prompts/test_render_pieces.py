"""However a batch is cut into pieces, what is prepared of it is the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.request import RowError
from batchinfer.data.prompts.prepare import Prepared
from batchinfer.data.prompts.render_pieces import RowPieces, joined

SHORT = RowError("template_memory", "resource", "", retryable=False)
BAD = RowError("template_error", "bad_input", "", retryable=False)


def prepared(rows: list[str]) -> Prepared:
    """As a worker does: parameters are listed once, in the order in which rows first have them."""
    errors = {at: BAD for at, row in enumerate(rows) if row == "!"}
    good = [row for row in rows if row != "!"]
    params = list(dict.fromkeys(row[0] for row in good))
    return Prepared(
        errors,
        params,
        [0 if row == "!" else params.index(row[0]) for row in rows],
        [0 if row == "!" else len(row) for row in rows],
        np.array([0 if row == "!" else len(row) for row in rows], np.int32),
        b"".join(bytes(32) if row == "!" else row.encode().ljust(32) for row in rows),
        np.frombuffer("".join(good).encode(), np.uint8).astype(np.int32),
    )


def same(one: Prepared, other: Prepared) -> bool:
    plain = ("errors", "params", "params_of", "max_tokens", "keys")
    arrays = ("counts", "tokens")
    equal = all(getattr(one, name) == getattr(other, name) for name in plain)
    return equal and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)


ROWS = st.lists(st.sampled_from(["!", "a", "ab", "b", "bcd", "c"]), max_size=12)


@given(ROWS, st.data())
def test_pieces_join_to_the_whole(rows: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    pieces = [prepared(rows[a:b]) for a, b in pairwise(bounds)]
    assert same(joined(pieces), prepared(rows))


@given(ROWS.filter(bool), st.data())
def test_processes_that_end_anywhere_cost_only_what_ends_them_again(
    rows: list[str], data: st.DataObject
) -> None:
    """Accidents end up to four processes at any row; a row of `killers` ends each that comes to it."""
    numbers = st.integers(0, len(rows) - 1)
    killers, accidents = data.draw(st.sets(numbers)), data.draw(st.lists(numbers, max_size=4, unique=True))
    pieces = RowPieces(len(rows))
    while pieces:
        piece = pieces.present
        ends = [at for at in range(piece.start, piece.stop) if at in killers or at in accidents]
        if not ends:
            assert pieces.done(prepared(rows[piece.start : piece.stop]))
            continue
        if ends[0] in accidents:
            accidents.remove(ends[0])
        if piece.accused:
            pieces.blame("template_crash", "")
        else:
            pieces.accuse(ends[0] - piece.start)
    found = pieces.joined()
    assert {at for at, error in found.errors.items() if error.code == "template_crash"} == killers
    expected = prepared(["!" if at in killers else row for at, row in enumerate(rows)])
    expected.errors = found.errors
    assert same(found, expected)


def test_a_row_that_found_no_memory_is_prepared_again_by_itself() -> None:
    """Rows before it may have taken it."""
    short = prepared(["a", "!", "b"])
    short.errors = {1: SHORT}
    pieces = RowPieces(3)
    assert not pieces.done(short)
    bounds = []
    for row in ("a", "ab", "b"):
        bounds.append((pieces.present.start, pieces.present.stop, pieces.present.accused))
        assert pieces.done(prepared([row]))
    assert bounds == [(0, 1, False), (1, 2, True), (2, 3, False)]
    assert same(pieces.joined(), prepared(["a", "ab", "b"]))
