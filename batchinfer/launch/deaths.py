"""Which rows were in work when an engine died: a row that was each time may be what kills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Deaths:
    """`name_rows` says in words which rows some keys stand for."""

    def __init__(self, name_rows: Callable[[Sequence[bytes]], str]) -> None:
        self._name_rows = name_rows
        self._before: list[bytes] | None = None  # in work at the death before this one; None: there was none

    def named(self, in_work: Sequence[bytes], loaded: bool, restarted: bool) -> str:
        """What was in work at this death, and what of it at the one before, too.

        `loaded`: the engine had; `restarted`: it had died before.
        """
        before, self._before = self._before, list(in_work)
        again = " again, after a restart" if restarted else ""
        if not in_work:
            return f"no row was in work{again}" if loaded else f"it was loading the model{again}"
        earlier = set(before or ())
        both = [key for key in in_work if key in earlier]
        if both:
            return f"in work both times it died: {self._name_rows(both)}"
        return f"in work{again}: {self._name_rows(in_work)}"
