"""Counts arguments of rows that are ignored because the chat template does not read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAME = 60  # maximum characters kept of a name
_MOST_NAMES = 20  # maximum number of names kept


class UnreadArguments:
    """The number of rows per argument that the template does not read."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def add(self, names: Iterable[str], rows: int = 1) -> None:
        """Add `rows` to the count of each name. Only the first names are kept."""
        for short in dict.fromkeys(name[:_NAME] for name in names):
            if short in self.rows or len(self.rows) < _MOST_NAMES:
                self.rows[short] = self.rows.get(short, 0) + rows

    def join(self, others: Mapping[str, int]) -> None:
        """Add counts from elsewhere."""
        for name, rows in others.items():
            self.add((name,), rows)


def unread_text(rows: Mapping[str, int]) -> str | None:
    """Return a message about ignored arguments and their rows, or None."""
    if not rows:
        return None
    most_first = sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"{name!r} ({count:,} row{'s' * (count != 1)})" for name, count in most_first)
    more = ", …" if len(rows) == _MOST_NAMES else ""
    return f"the chat template does not read arguments that rows give it, which were ignored: {shown}{more}"
