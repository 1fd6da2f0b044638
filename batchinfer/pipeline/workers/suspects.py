"""Suspects: rows that were running when an engine died. A binary search finds the rows that kill engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from batchinfer.core.request import Request


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows that an engine runs without other rows, to find out whether they kill it.

    Attributes:
        requests: The rows.
        twin: The other half, if this group is one half of a group that killed its engine. Else None.
        died_in: Number of the replica that this single row killed, or None.
        is_probe: True if the group is a copy of an answered row, which tests whether an engine works.
    """

    requests: list[Request]
    twin: RowGroup | None = None
    died_in: int | None = None
    is_probe: bool = False


def probe_of(answered: Request) -> RowGroup:
    """Return a group with a copy of an answered row, to test whether an engine works.

    The copy has another work key, so its answer is not taken for the answer of the row.
    """
    key = sha256(b"proof" + answered.key).digest()
    return RowGroup([replace(answered, key=key, shares_next=0)], is_probe=True)


class Suspects:
    """The groups of suspect rows that wait to run.

    A group that kills its engine is split into two halves. If one half finishes, the cause must be in the other half,
    which is split again before it runs. So one bad row among n is found after about log2(n) groups.
    """

    def __init__(self) -> None:
        self._waiting: list[RowGroup] = []  # a stack: the last group runs next

    def __len__(self) -> int:
        """Return the number of groups that wait to run."""
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Add rows that were running when an engine died, as one group."""
        if requests:
            self._waiting.append(RowGroup([replace(request, shares_next=0) for request in requests]))

    def take(self, one: bool = False, not_of: int | None = None) -> RowGroup | None:
        """Remove and return the group of suspects to run next, or None if there is none.

        Args:
            one: True to return a single row, preferably one that has not killed an engine yet.
            not_of: Number of a replica. Single rows that killed this replica are skipped. None: no row is skipped.
        """
        fit = [group for group in self._waiting if not_of is None or group.died_in != not_of]
        if not fit:
            return None
        group = next((far for far in fit if far.died_in is None), fit[0]) if one else fit[-1]
        self._waiting.remove(group)
        if one and len(group.requests) > 1:
            self.add(group.requests[1:])
            return RowGroup(group.requests[:1])
        return group

    def record_death(self, requests: Sequence[Request], engine: int) -> None:
        """Add the unfinished rows of a group that killed its engine: a single row unchanged, several as two halves.

        Args:
            requests: The unfinished rows.
            engine: Number of the replica that they killed.
        """
        if len(requests) == 1:
            self._waiting.append(RowGroup(list(requests), died_in=engine))
        else:
            self._halve(requests)

    def record_finish(self, group: RowGroup) -> None:
        """Record that an engine has finished a group without dying.

        If the group is half of a group that killed an engine, the other half must have the cause, and is split again.

        Args:
            group: The group.
        """
        twin = group.twin
        if twin in self._waiting and twin is not None and len(twin.requests) > 1:
            self._waiting.remove(twin)
            self._halve(twin.requests)

    def _halve(self, requests: Sequence[Request]) -> None:
        middle = len(requests) // 2
        first, second = RowGroup(list(requests[:middle])), RowGroup(list(requests[middle:]))
        first.twin, second.twin = second, first
        self._waiting += [second, first]
