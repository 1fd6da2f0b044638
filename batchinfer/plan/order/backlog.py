"""Divides the requests of a plan among engines. Holds the requests that no engine has yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from batchinfer.core.request import Request

# A split makes engines on both sides compute the shared prefix. The prefix may cost 1/DIVIDES_AT of the rows' work.
DIVIDES_AT = 8
MOST_ROWS = 256  # maximum rows per hand-out, with several engines
# Each hand-out is an engine's equal share of the remaining rows divided by this. Hand-outs shrink towards the end, so
# engines finish together even if one is several times slower.
PIECES_LEFT = 4
_READ = 1024  # rows read at a time; `choose_split` examines all rows that were read


class Backlog:
    """The requests of a plan that no engine has received yet, in plan order.

    Requests with a common prefix are adjacent.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._free_tokens = 0  # prefix tokens of the first row that every engine computes anyway

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, requests: Sequence[Request]) -> None:
        """Add the next requests of the plan to the end of the backlog."""
        self._requests += requests

    def put_back(self, requests: Sequence[Request]) -> None:
        """Insert requests at the front of the backlog, because an engine that had taken them did not answer them."""
        self._requests[:0] = requests
        self._free_tokens = 0

    def take_all(self) -> list[Request]:
        """Remove and return all requests of the backlog."""
        taken, self._requests = self._requests, []
        return taken

    def take(self, rows: int, engines: int) -> list[Request]:
        """Remove and return the next requests of the backlog, to give to an engine.

        Requests that share a prefix stay together, unless computing the prefix in several engines is cheap.

        Args:
            rows: Desired number of requests. The result may have more, or fewer if the backlog has fewer.
            engines: Number of engines that share the backlog.
        """
        end, self._free_tokens = choose_split(self._requests, rows, engines, self._free_tokens)
        taken = self._requests[:end]
        del self._requests[:end]
        if taken and taken[-1].shares_next:  # the next row may go to another engine
            taken[-1] = replace(taken[-1], shares_next=0)
        return taken


def choose_split(
    requests: Sequence[Request], rows: int, engines: int, free_tokens: int = 0
) -> tuple[int, int]:
    """Choose where to split a list of requests, so that few engines compute the same prefix.

    The split is after at least `rows` and less than 2 × `rows` requests, at the place where neighbouring requests share
    the shortest prefix. If computing this prefix again after the split costs too much (DIVIDES_AT), `rows` is doubled.
    If no split is cheap enough, the result is the whole list.

    Args:
        requests: Requests in plan order.
        rows: Desired number of requests before the split.
        engines: Number of engines.
        free_tokens: Number of first tokens of the first request that every engine computes anyway, so they cost
            nothing.

    Returns:
        The number of requests before the split, and the value of `free_tokens` for the requests after it.
    """
    work, rows = _work(requests), max(1, rows)
    kept = list(accumulate((request.shares_next for request in requests), min, initial=free_tokens))[1:]
    while rows < len(requests):
        ends = range(rows, min(2 * rows, len(requests)))
        end = min(ends, key=lambda number: requests[number - 1].shares_next)
        shared = requests[end - 1].shares_next
        cost = (shared - kept[end - 1]) * DIVIDES_AT
        # Every engine may compute the prefix, which makes later splits within it free
        if cost <= work[_group_end(requests, end) - 1] // max(1, engines - 1):
            return end, shared
        # Only the two sides of this split compute the prefix
        if cost <= work[end - 1]:
            return end, kept[end - 1]
        rows *= 2
    return len(requests), 0


def _group_end(requests: Sequence[Request], end: int) -> int:
    shared = requests[end - 1].shares_next
    while end < len(requests) and requests[end - 1].shares_next >= shared:
        end += 1
    return end


def _work(requests: Sequence[Request]) -> list[int]:
    shared = [0, *(request.shares_next for request in requests[:-1])]
    each = (
        max(0, len(request.prompt) - common) + request.params.max_tokens
        for request, common in zip(requests, shared, strict=True)
    )
    return list(accumulate(each))


def tokens_of(request: Request) -> int:
    """Return the prompt tokens plus the maximum answer tokens of a request."""
    return len(request.prompt) + request.params.max_tokens


def piece_rows(left: int, engines: int) -> int:
    """Return how many requests to give to an engine at a time.

    It is the engine's equal share of the rest, divided by PIECES_LEFT (4), so pieces become smaller towards the end.
    The result is from 1 to MOST_ROWS (256).

    Args:
        left: Number of requests that no engine has received yet.
        engines: Number of engines.
    """
    return max(1, min(MOST_ROWS, left // (PIECES_LEFT * engines)))


def share_of(requests: Sequence[Request], engines: int) -> list[Request]:
    """Return the requests that the engine with the most work would get if all engines were equally fast.

    The result is used to simulate a run with several engines.

    Args:
        requests: All requests, in plan order.
        engines: Number of engines that divide the requests.
    """
    if engines == 1:
        return list(requests)
    backlog, loads = Backlog(), [0] * engines
    shares: list[list[Request]] = [[] for _ in range(engines)]
    left, read = len(requests), 0
    while left:
        rows = piece_rows(left, engines)
        while read < len(requests) and len(backlog) < 2 * rows:  # the run reads ahead by the same number
            backlog.append(requests[read : read + _READ])
            read += _READ
        piece = backlog.take(rows, engines)
        left -= len(piece)
        least = loads.index(min(loads))
        shares[least] += piece
        loads[least] += sum(map(tokens_of, piece))
    return shares[loads.index(max(loads))]
