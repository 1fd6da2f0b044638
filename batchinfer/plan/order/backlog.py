"""Rows that no engine has been given yet, and where they are divided among engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from batchinfer.core.request import Request

# Engines that rows on both sides of a cut go to run what they share each: it may cost such a part of these rows' work.
DIVIDES_AT = 8
MOST_ROWS = 256  # that one of several engines is given at once
# The fewer rows are left, the fewer are handed out at once: an engine's even share of them divided by this. So engines
# end together, even if one is several times slower than another.
PIECES_LEFT = 4
_READ = 1024  # rows at a time: a cut looks at all that were read


class Backlog:
    """Rows in the plan's order, in which those that share a prefix follow one another."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._paid = 0  # tokens that the first row shares with rows before it, and that every engine may run

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, requests: Sequence[Request]) -> None:
        """The next rows of the plan."""
        self._requests += requests

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put back rows that an engine had: they are the first to be handed out again."""
        self._requests[:0] = requests
        self._paid = 0

    def take_all(self) -> list[Request]:
        taken, self._requests = self._requests, []
        return taken

    def take(self, rows: int, engines: int) -> list[Request]:
        """Take about `rows` of the first rows, at least one, for one of several engines: rows that share a prefix stay
        together, unless running the prefix in several engines costs little compared to these rows."""
        end, self._paid = cut(self._requests, rows, engines, self._paid)
        taken = self._requests[:end]
        del self._requests[:end]
        if taken and taken[-1].shares_next:  # what follows may go to another engine
            taken[-1] = replace(taken[-1], shares_next=0)
        return taken


def cut(requests: Sequence[Request], rows: int, engines: int, paid: int = 0) -> tuple[int, int]:
    """Return how many of the first requests to take: `rows` up to twice as many, ending where the least is shared; and
    more if even there the cut would cost too much, all of them at the most. And what is `paid` behind the cut.

    Another engine runs once more what rows on both sides share. That must cost little compared to the rows that are cut
    off, or, if each engine does so, to all rows up to the last that shares as much; once it is paid for all engines,
    further cuts among these rows cost nothing. `paid`: what the first row shares with those before it, paid for by
    then.
    """
    work, rows = _work(requests), max(1, rows)
    kept = list(accumulate((request.shares_next for request in requests), min, initial=paid))[1:]
    while rows < len(requests):
        ends = range(rows, min(2 * rows, len(requests)))
        end = min(ends, key=lambda number: requests[number - 1].shares_next)
        shared = requests[end - 1].shares_next
        cost = (shared - kept[end - 1]) * DIVIDES_AT
        if cost <= work[_group_end(requests, end) - 1] // max(1, engines - 1):
            return end, shared
        if cost <= work[end - 1]:
            return end, kept[end - 1]
        rows *= 2
    return len(requests), 0


def _group_end(requests: Sequence[Request], end: int) -> int:
    """Behind the last request that shares as much with those before as the one behind `end` does."""
    shared = requests[end - 1].shares_next
    while end < len(requests) and requests[end - 1].shares_next >= shared:
        end += 1
    return end


def _work(requests: Sequence[Request]) -> list[int]:
    """Tokens, prompt and answer, of each request and all before it, shared ones once."""
    shared = [0, *(request.shares_next for request in requests[:-1])]
    each = (
        max(0, len(request.prompt) - common) + request.params.max_tokens
        for request, common in zip(requests, shared, strict=True)
    )
    return list(accumulate(each))


def tokens_of(request: Request) -> int:
    """Return the tokens of a request's prompt, and of its answer if that becomes as long as it may."""
    return len(request.prompt) + request.params.max_tokens


def piece_rows(left: int, engines: int) -> int:
    """Return how many rows one of these engines is given at once, while `left` rows are left."""
    return max(1, min(MOST_ROWS, left // (PIECES_LEFT * engines)))


def share_of(requests: Sequence[Request], engines: int) -> list[Request]:
    """Return the requests that the busiest of the engines gets, if all are equally fast."""
    if engines == 1:
        return list(requests)
    backlog, loads = Backlog(), [0] * engines
    shares: list[list[Request]] = [[] for _ in range(engines)]
    left, read = len(requests), 0
    while left:
        rows = piece_rows(left, engines)
        while read < len(requests) and len(backlog) < 2 * rows:  # as those are read that are handed out
            backlog.append(requests[read : read + _READ])
            read += _READ
        piece = backlog.take(rows, engines)
        left -= len(piece)
        least = loads.index(min(loads))
        shares[least] += piece
        loads[least] += sum(map(tokens_of, piece))
    return shares[loads.index(max(loads))]
