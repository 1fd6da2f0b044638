"""Splits a chunk into pieces to find the row that kills or hangs a render worker, and prepares it separately."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.reasoning import NO_MARKER
from batchinfer.core.request import RowError, TokenIds
from batchinfer.input.prompts.arguments.unread import UnreadArguments
from batchinfer.input.prompts.keys import KEY_BYTES
from batchinfer.input.prompts.prepare import RowPiece
from batchinfer.input.prompts.prepared.rows import (
    FurtherPrompts,
    OwnTexts,
    PreparedPrompts,
    PreparedRows,
    PreparedRungs,
)
from batchinfer.input.prompts.row_facts import RowFields, join_facts, no_facts
from batchinfer.input.rows import row_error

# The error of a row that ran out of memory, which may be the fault of rows before it
_OF_MEMORY = "template_memory"
_EMPTY = np.zeros(0, np.int32)
_UNSAID = np.full(1, NO_MARKER, np.int8)
_ONE = np.zeros(1, np.int32)


class RowPieces:
    """The rows of a chunk, divided into pieces that a render worker prepares in order.

    At first the chunk is one piece. If the worker dies or hangs, pieces are split to find the row at fault.

    Args:
        rows: The maximum number of rows of the chunk.
        fields: The values to take from a row.

    Attributes:
        blamed: The number of consecutive rows up to the present piece that killed or hung a worker.
    """

    def __init__(self, rows: int, fields: RowFields) -> None:
        self._left = deque([RowPiece(0, rows)])
        self._fields = fields
        self._done: list[PreparedRows] = []
        self.blamed = 0  # number of consecutive rows at fault, up to the present piece

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def present(self) -> RowPiece:
        """The piece to prepare next, or the piece that a worker process is preparing."""
        return self._left[0]

    def fits(self, rows: int) -> bool:
        """Return True if the present piece may have this number of rows: as expected, or fewer if it is the last."""
        return rows == len(self.present) or (rows < len(self.present) and len(self._left) == 1)

    def done(self, reply: PreparedRows) -> bool:
        """Record the prepared rows of the present piece, and move on to the next piece.

        Returns:
            False if preparing some of the rows ran out of memory. The piece is then split, and each of these rows is
            prepared again alone.
        """
        piece = self.present
        short = [at for at, error in sorted(reply.prompts.errors.items()) if error.code == _OF_MEMORY]
        if short and not piece.accused:
            self._split([piece.start + at for at in short])
            return False
        self._left.popleft()
        self._done.append(reply)
        if piece.given is None:
            self.blamed = 0
        return True

    def isolate_row(self, row: int) -> None:
        """Split the present piece, because a worker process died or hung at a row. The row is prepared again alone.

        Args:
            row: The number of the row in the present piece, from 0.
        """
        self._split([self.present.start + row])

    def fail_row(self, code: str, message: str) -> None:
        """Make the only row of the present piece an error row, because it killed or hung a worker process again.

        The row is only read again, for its id and carried columns. If that fails too, they are null.

        Args:
            code: The code of the row's error.
            message: The message of the row's error.
        """
        piece = self._left.popleft()
        if piece.given is None:
            error = row_error(code, message, "resource")
            self._left.appendleft(RowPiece(piece.start, piece.stop, accused=True, given=error))
            self.blamed += 1
        else:
            self._done.append(PreparedRows(_error_row(piece.given), no_facts(self._fields, 1)))

    def prepare_singly(self) -> None:
        """Let the present piece be prepared again, row by row, because a worker process died and reported no row."""
        piece = self._left.popleft()
        careful = RowPiece(piece.start, piece.stop, piece.accused, careful=True, given=piece.given)
        self._left.appendleft(careful)

    def join(self) -> PreparedRows:
        """Return all prepared rows of the chunk as if they had been prepared at once."""
        return self._done[0] if len(self._done) == 1 else join_rows(self._done)

    def _split(self, rows: Sequence[int]) -> None:
        piece = self._left.popleft()
        parts, start = [], piece.start
        for row in rows:
            between = RowPiece(start, row, careful=piece.careful)
            parts += [between, RowPiece(row, row + 1, accused=True, careful=True)]
            start = row + 1
        parts.append(RowPiece(start, piece.stop, careful=piece.careful))
        self._left.extendleft(part for part in reversed(parts) if len(part))


def _error_row(error: RowError) -> PreparedPrompts:
    return PreparedPrompts({0: error}, [], _ONE, _ONE, _ONE, bytes(KEY_BYTES), _EMPTY, _UNSAID)


def join_rows(pieces: Sequence[PreparedRows]) -> PreparedRows:
    """Join the prepared rows of consecutive pieces of a chunk, in order."""
    prompts = join_prompts(piece.prompts for piece in pieces)
    return PreparedRows(prompts, join_facts([piece.facts for piece in pieces]))


def join_prompts(pieces: Iterable[PreparedPrompts]) -> PreparedPrompts:
    """Join the prompts of consecutive pieces of a chunk, in order.

    Equal sampling parameters are listed once in the result.
    """
    errors: dict[int, RowError] = {}
    numbers: dict[str, int] = {}
    params_of, max_tokens, counts, tokens = ([_EMPTY] for _ in range(4))
    tools, openings, keys, start, pieces, unread = (
        _JoinedTools(),
        [_UNSAID[:0]],
        [],
        0,
        list(pieces),
        UnreadArguments(),
    )
    rungs = [_JoinedRung() for _ in range(max((len(piece.rungs) for piece in pieces), default=0))]
    for piece in pieces:
        unread.join(piece.unread)
        tools.add(piece)
        errors |= {start + at: error for at, error in piece.errors.items()}
        params_of.append(_renumber(piece, numbers))
        max_tokens.append(piece.max_tokens)
        counts.append(piece.counts)
        tokens.append(piece.tokens)
        openings.append(piece.openings)
        keys.append(piece.keys)
        for at, rung in enumerate(rungs):
            rung.add(piece, at, numbers)
        start += len(piece)
    return PreparedPrompts(
        errors,
        [*numbers],
        np.concatenate(params_of),
        np.concatenate(max_tokens),
        np.concatenate(counts),
        b"".join(keys),
        np.concatenate(tokens),
        np.concatenate(openings),
        unread.rows,
        [rung.join() for rung in rungs],
        tools.join(),
        samples=_join_numbers([piece.samples for piece in pieces], pieces),
        dimensions=_join_numbers([piece.dimensions for piece in pieces], pieces),
        further=_join_further(pieces),
    )


def _join_numbers(
    each: Sequence[NDArray[np.int32] | None], pieces: Sequence[PreparedPrompts]
) -> NDArray[np.int32] | None:
    if all(one is None for one in each):
        return None
    own = zip(each, pieces, strict=True)
    return np.concatenate([np.zeros(len(piece), np.int32) if one is None else one for one, piece in own])


def _join_further(pieces: Sequence[PreparedPrompts]) -> FurtherPrompts:
    starts = accumulate((len(piece) for piece in pieces), initial=0)
    each = [piece.further for piece in pieces]
    rows = [one.rows + np.int32(start) for one, start in zip(each, starts, strict=False)]
    counts, tokens = [one.counts for one in each], [one.tokens for one in each]
    return FurtherPrompts(
        np.concatenate([_EMPTY, *rows]),
        np.concatenate([_EMPTY, *counts]),
        b"".join(one.keys for one in each),
        np.concatenate([_EMPTY, *tokens]),
    )


class _JoinedTools:
    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of = [_EMPTY]

    def add(self, piece: PreparedPrompts) -> None:
        texts, of = piece.own_texts
        own = [0, *(self._numbers.setdefault(text, len(self._numbers) + 1) for text in texts)]
        self._of.append(np.array(own, np.int32)[of] if texts else np.zeros(len(piece), np.int32))

    def join(self) -> OwnTexts:
        return OwnTexts.found(self._numbers, np.concatenate(self._of))


class _JoinedRung:
    def __init__(self) -> None:
        self._params_of, self._max_tokens, self._keys = [_EMPTY], [_EMPTY], list[bytes]()

    def add(self, piece: PreparedPrompts, at: int, numbers: dict[str, int]) -> None:
        if at >= len(piece.rungs):
            rung = PreparedRungs(np.full(len(piece), -1, np.int32), np.zeros(len(piece), np.int32), b"")
            rung.keys = bytes(KEY_BYTES * len(piece))
        else:
            rung = piece.rungs[at]
        own = np.array([numbers.setdefault(text, len(numbers)) for text in piece.params] or [0], np.int32)
        self._params_of.append(np.where(rung.params_of < 0, -1, own[rung.params_of]).astype(np.int32))
        self._max_tokens.append(rung.max_tokens)
        self._keys.append(rung.keys)

    def join(self) -> PreparedRungs:
        params_of, most = np.concatenate(self._params_of), np.concatenate(self._max_tokens)
        return PreparedRungs(params_of, most, b"".join(self._keys))


def _renumber(piece: PreparedPrompts, numbers: dict[str, int]) -> TokenIds:
    own = np.array([numbers.setdefault(text, len(numbers)) for text in piece.params] or [0], np.int32)
    found = own[piece.params_of]
    found[list(piece.errors)] = 0
    return found
