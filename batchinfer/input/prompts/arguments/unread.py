"""Counts the arguments that rows give and their chat template does not read, which are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAME = 60  # characters of an argument's name that are remembered
_MOST_NAMES = 20  # of unread arguments that are remembered


class UnreadArguments:
    """Counts the rows that give an argument which the template does not read, by its name."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def add(self, names: Iterable[str], rows: int = 1) -> None:
        """Count so many rows more for each of these names; only the first names are remembered."""
        for short in dict.fromkeys(name[:_NAME] for name in names):
            if short in self.rows or len(self.rows) < _MOST_NAMES:
                self.rows[short] = self.rows.get(short, 0) + rows

    def join(self, others: Mapping[str, int]) -> None:
        """Count what was counted elsewhere."""
        for name, rows in others.items():
            self.add((name,), rows)


def unread_text(rows: Mapping[str, int]) -> str | None:
    """Say which arguments were ignored, in how many rows. None: no argument was."""
    if not rows:
        return None
    most_first = sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"{name!r} ({count:,} row{'s' * (count != 1)})" for name, count in most_first)
    more = ", …" if len(rows) == _MOST_NAMES else ""
    return f"the chat template does not read arguments that rows give it, which were ignored: {shown}{more}"
