"""Counts arguments of rows that are ignored because the chat template does not read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAME = 60  # maximum characters kept of a name
_MOST_NAMES = 20  # maximum number of names kept


class UnreadArguments:
    """Counts, per argument of the chat template, the rows that set it although the template does not read it.

    Attributes:
        rows: The number of rows by name of the argument.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def add(self, names: Iterable[str], rows: int = 1) -> None:
        """Add rows that set arguments which the template does not read. At most 20 names are kept.

        Args:
            names: The names of the arguments.
            rows: The number of rows.
        """
        for short in dict.fromkeys(name[:_NAME] for name in names):
            if short in self.rows or len(self.rows) < _MOST_NAMES:
                self.rows[short] = self.rows.get(short, 0) + rows

    def join(self, others: Mapping[str, int]) -> None:
        """Add the counts of another process: the number of rows by name of the argument."""
        for name, rows in others.items():
            self.add((name,), rows)


def unread_text(rows: Mapping[str, int]) -> str | None:
    """Return a message about the ignored arguments, or None if there are none. `rows` is the number of rows by name."""
    if not rows:
        return None
    most_first = sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"{name!r} ({count:,} row{'s' * (count != 1)})" for name, count in most_first)
    more = ", …" if len(rows) == _MOST_NAMES else ""
    return f"the chat template does not read arguments that rows give it, which were ignored: {shown}{more}"
