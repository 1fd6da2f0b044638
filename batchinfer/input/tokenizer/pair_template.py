"""The tokens that a tokenizer puts around two texts, and the types that it gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

_PROBES = ("a", "b")  # two texts that show where a tokenizer puts them
_NOT_IN_TURN = "the tokenizer does not put two texts one behind the other, each once"
_ORDERS = [[0, 1], [None, 0, 1], [0, None, 1], [0, 1, None], [None, 0, None, 1], [None, 0, 1, None]]
_ORDERS += [[0, None, 1, None], [None, 0, None, 1, None]]


class NoPairs(ValueError):
    """A tokenizer that does not put two texts one behind the other; the message says how."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The tokens before, between and behind two texts. `typed`: how many of those in between have the type 0, behind
    which all have the type 1; None: all tokens have the type 0."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    typed: int | None

    @classmethod
    def of(cls, rust: Any) -> Self:
        """Read the template of a `tokenizers.Tokenizer`. Raises NoPairs."""
        found, other = (cls._read(rust.encode(*texts)) for texts in (_PROBES, _PROBES[::-1]))
        if found != other:
            raise NoPairs(_NOT_IN_TURN)
        return found

    @classmethod
    def _read(cls, found: Any) -> Self:
        """Read the template of what two texts were encoded as."""
        runs = [(of, len([*run])) for of, run in groupby(found.sequence_ids)]
        if [of for of, _ in runs] not in _ORDERS:
            raise NoPairs(_NOT_IN_TURN)
        sizes = dict(zip(_places([of for of, _ in runs]), (size for _, size in runs), strict=True))
        start = sizes.get("before", 0)
        middle = start + sizes["first"]
        second = middle + sizes.get("between", 0)
        end, ids = second + sizes["second"], found.ids
        typed = _typed(found.type_ids, middle)
        return cls(
            tuple(ids[:start]),
            tuple(ids[middle:second]),
            tuple(ids[end:]),
            None if typed is None else typed - middle,
        )

    @property
    def added(self) -> int:
        """Count the tokens around two texts."""
        return len(self.before) + len(self.between) + len(self.behind)

    def joined(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Return the tokens of both texts with those around them."""
        return [*self.before, *first, *self.between, *second, *self.behind]

    def second_segment(self, first: Sequence[int], second: Sequence[int]) -> int:
        """Return the place of the first token of type 1, where the texts have these tokens; 0: there is none."""
        if self.typed is None:
            return 0
        place = len(self.before) + len(first) + self.typed
        return place if place < self.added + len(first) + len(second) else 0


def _places(order: list[int | None]) -> list[str]:
    """Name the parts of a template whose texts are in this order."""
    first, second = order.index(0), order.index(1)
    names = {first: "first", second: "second"}
    return [
        names.get(at, "before" if at < first else "between" if at < second else "behind")
        for at in range(len(order))
    ]


def _typed(types: Sequence[int], middle: int) -> int | None:
    """Return the place of the first token of type 1; None: there is none. Raises NoPairs."""
    if not any(types):
        return None
    first = next(at for at, of in enumerate(types) if of)
    if first < middle or [*types[first:]] != [1] * (len(types) - first):
        raise NoPairs(
            f"the tokenizer gives two texts the token types {[*types]}, and computed are 0 … 0 1 … 1"
        )
    return first


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept where both may have `room`: the longer one is cut, and both to a
    half where that is not enough. As `tokenizers` does with the strategy longest_first."""
    if first + second <= room:
        return first, second
    short = min(first, second)
    if short > room // 2:
        short, long = room // 2, room - room // 2
    else:
        long = room - short
    return (short, long) if first <= second else (long, short)
