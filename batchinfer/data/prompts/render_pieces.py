"""A batch of rows in pieces: when a process ends or hangs, the row that it was at is prepared again by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.core.request import RowError, TokenIds
from batchinfer.data.input.rows import row_error
from batchinfer.data.prompts.prepare import Prepared

# What a row gets that found no memory: rows before it may have taken it.
_OF_MEMORY = "template_memory"
_EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Rows start … stop - 1 of a batch, which are prepared together.

    `accused`: its only row was at work when an earlier process ended. `careful`: rows are tokenised one by one.
    """

    start: int
    stop: int
    accused: bool = False
    careful: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


class RowPieces:
    """The pieces of one batch, first to last: what was prepared of those before, and what is still to be prepared."""

    def __init__(self, rows: int) -> None:
        self._left = deque([RowPiece(0, rows)])
        self._done: list[Prepared] = []
        self.blamed = 0  # rows in a row, up to the present piece

    def __bool__(self) -> bool:
        """Whether there is more to prepare."""
        return bool(self._left)

    @property
    def present(self) -> RowPiece:
        """The piece that is prepared now."""
        return self._left[0]

    def done(self, reply: Prepared) -> bool:
        """The present piece was prepared. Returns whether it counts: rows without memory are prepared again."""
        piece = self.present
        short = [at for at, error in sorted(reply.errors.items()) if error.code == _OF_MEMORY]
        if short and not piece.accused:
            self._split([piece.start + at for at in short])
            return False
        self._left.popleft()
        self._done.append(reply)
        self.blamed = 0
        return True

    def accuse(self, row: int) -> None:
        """A process ended or hung at this row of the present piece, and nothing says yet that it is the row's fault."""
        self._split([self.present.start + row])

    def blame(self, code: str, message: str) -> None:
        """The present piece's only row did the same once more, by itself."""
        self._left.popleft()
        self._done.append(_error_row(row_error(code, message, "resource")))
        self.blamed += 1

    def be_careful(self) -> None:
        """A process ended in the present piece, at no row that is known."""
        piece = self._left.popleft()
        self._left.appendleft(RowPiece(piece.start, piece.stop, piece.accused, careful=True))

    def joined(self) -> Prepared:
        """The whole batch, as if it had been prepared at once."""
        return self._done[0] if len(self._done) == 1 else joined(self._done)

    def _split(self, rows: Sequence[int]) -> None:
        """These rows of the present piece by themselves, and those between them together."""
        piece = self._left.popleft()
        parts, start = [], piece.start
        for row in rows:
            between = RowPiece(start, row, careful=piece.careful)
            parts += [between, RowPiece(row, row + 1, accused=True, careful=True)]
            start = row + 1
        parts.append(RowPiece(start, piece.stop, careful=piece.careful))
        self._left.extendleft(part for part in reversed(parts) if len(part))


def _error_row(error: RowError) -> Prepared:
    return Prepared({0: error}, [], [0], [0], np.zeros(1, np.int32), bytes(32), _EMPTY)


def joined(pieces: Iterable[Prepared]) -> Prepared:
    """One batch of all rows, in order. Parameters that several pieces have are listed once."""
    whole = Prepared({}, [], [], [], _EMPTY, b"", _EMPTY)
    numbers: dict[str, int] = {}
    counts: list[TokenIds] = []
    tokens: list[TokenIds] = []
    keys = []
    for piece in pieces:
        start = len(whole.params_of)
        whole.errors.update((start + at, error) for at, error in piece.errors.items())
        own = [numbers.setdefault(text, len(numbers)) for text in piece.params] or [0]
        whole.params_of += [
            own[number] if at not in piece.errors else 0 for at, number in enumerate(piece.params_of)
        ]
        whole.max_tokens += piece.max_tokens
        counts.append(piece.counts)
        keys.append(piece.keys)
        tokens.append(piece.tokens)
    numpy_joined = np.concatenate(counts), b"".join(keys), np.concatenate(tokens)
    return Prepared(whole.errors, [*numbers], whole.params_of, whole.max_tokens, *numpy_joined)
