"""Rows that were in work when an engine died: which of them it is that kills engines is found by halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from batchinfer.core.request import Request


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows that an engine runs with no others."""

    requests: list[Request]
    twin: RowGroup | None = None  # the other half of the group that died
    died_in: int | None = None  # the engine that died of it, if it is one row
    is_proof: bool = False  # no row that waits: whoever answers it works


def proof_of(answered: Request) -> RowGroup:
    """Return a row that was answered, to be run by an engine that is doubted. Its key is another one: nobody takes its
    answer for the row's."""
    key = sha256(b"proof" + answered.key).digest()
    return RowGroup([replace(answered, key=key, shares_next=0)], is_proof=True)


class Suspects:
    """Groups of rows that wait to be run by themselves.

    A group that dies is halved. If one half then finishes, what kills is in the other one, which is halved before it is
    run: of n rows, one that kills is found after log2(n) groups, about half of which die.
    """

    def __init__(self) -> None:
        self._waiting: list[RowGroup] = []  # the last one is next: halves follow the group that they are of

    def __len__(self) -> int:
        """Return how many groups wait."""
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Add rows that were in work when an engine died, with others or not."""
        if requests:
            self._waiting.append(RowGroup([replace(request, shares_next=0) for request in requests]))

    def take(self, one: bool = False, not_of: int | None = None) -> RowGroup | None:
        """Return the group to run next; if `one`, a single row, as far as possible from those that died last: rows that
        kill may be neighbours. A row of which the engine `not_of` died is left out."""
        fit = [group for group in self._waiting if not_of is None or group.died_in != not_of]
        if not fit:
            return None
        group = next((far for far in fit if far.died_in is None), fit[0]) if one else fit[-1]
        self._waiting.remove(group)
        if one and len(group.requests) > 1:
            self.add(group.requests[1:])
            return RowGroup(group.requests[:1])
        return group

    def died(self, requests: Sequence[Request], engine: int) -> None:
        """Take back the rows of a group that were unfinished when its engine died."""
        if len(requests) == 1:
            self._waiting.append(RowGroup(list(requests), died_in=engine))
        else:
            self._halve(requests)

    def finished(self, group: RowGroup) -> None:
        """Note that all rows of a group were answered."""
        twin = group.twin
        if twin in self._waiting and twin is not None and len(twin.requests) > 1:
            self._waiting.remove(twin)
            self._halve(twin.requests)

    def _halve(self, requests: Sequence[Request]) -> None:
        middle = len(requests) // 2
        first, second = RowGroup(list(requests[:middle])), RowGroup(list(requests[middle:]))
        first.twin, second.twin = second, first
        self._waiting += [second, first]
