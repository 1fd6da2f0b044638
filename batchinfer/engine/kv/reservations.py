"""Which contents of KV blocks waiting sequences will look for. Ints only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class Reservations:
    """For each content the turns of the sequences that reserve it; a smaller turn comes earlier."""

    def __init__(self) -> None:
        self.turns: dict[bytes, list[int]] = {}  # ascending

    def __contains__(self, content: bytes) -> bool:
        return content in self.turns

    def add(self, contents: Iterable[bytes], turn: int) -> None:
        for content in contents:
            turns = self.turns.setdefault(content, [])
            if turns and turn < turns[-1]:
                insort(turns, turn)  # a preempted sequence is back
            else:
                turns.append(turn)

    def remove(self, content: bytes, turn: int) -> bool:
        """Whether nobody else reserves it."""
        turns = self.turns[content]
        del turns[bisect_left(turns, turn)]
        if not turns:
            del self.turns[content]
        return not turns

    def count(self, content: bytes | None) -> int:
        """How many sequences reserve it."""
        return len(self.turns.get(content, ())) if content is not None else 0

    def first(self, content: bytes) -> int | None:
        """The turn that comes first of those that reserve it."""
        turns = self.turns.get(content)
        return turns[0] if turns else None
