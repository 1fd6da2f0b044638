"""Counts arguments of rows that are ignored because the chat template does not read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAME = 60  # maximum characters kept of a name
_MOST_NAMES = 20  # maximum number of names kept


class UnreadArguments:
    """Counts rows that set an argument which the chat template does not read, so that the argument has no effect.

    Attributes:
        rows: The number of such rows by name of the argument.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}

    def add(self, names: Iterable[str], rows: int = 1) -> None:
        """Count rows that set these arguments, which the template does not read. At most 20 names are kept.

        Args:
            names: The names of the arguments.
            rows: The number of rows that set all of them.
        """
        for short in dict.fromkeys(name[:_NAME] for name in names):
            if short in self.rows or len(self.rows) < _MOST_NAMES:
                self.rows[short] = self.rows.get(short, 0) + rows

    def join(self, others: Mapping[str, int]) -> None:
        """Add the counts of another process: the number of rows by name of the argument."""
        for name, rows in others.items():
            self.add((name,), rows)


def unread_text(rows: Mapping[str, int]) -> str | None:
    """Return a message about arguments that the chat template ignores, or None if there are none.

    Args:
        rows: The number of rows that set the argument, by name.
    """
    if not rows:
        return None
    most_first = sorted(rows.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"{name!r} ({count:,} row{'s' * (count != 1)})" for name, count in most_first)
    more = ", …" if len(rows) == _MOST_NAMES else ""
    return f"the chat template does not read arguments that rows give it, which were ignored: {shown}{more}"
