"""Orders, and the spellings of their closed-class parts: the answer line, numbers, dates.

Training and held-out data share only this file, because the ways to write a date or a number are few, and the model
must know them all. Names, items and sentences are open classes. They are in `sentences.py` (training) and `held_out.py`
(test).
"""

from __future__ import annotations

import calendar
import json
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random


def listed(words: str) -> tuple[str, ...]:
    """Split a plain text into its words."""
    return tuple(words.split())


_ONES = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_TENS = listed("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
_IDIOMS = {
    2: ("a pair of", "a couple of"),
    6: ("half a dozen",),
    12: ("a dozen", "one dozen"),
    24: ("two dozen",),
    36: ("three dozen",),
    48: ("four dozen",),
    60: ("five dozen",),
    100: ("a hundred", "one hundred"),
}
_FIRST_DAY = date(2025, 1, 1)
_DAYS = (date(2029, 12, 31) - _FIRST_DAY).days


@dataclass(frozen=True)
class Order:
    """An order: the content of a sentence and of its answer."""

    customer: str
    quantity: int
    item: str
    due: date

    def answer(self) -> str:
        """Return the expected answer: one line of JSON."""
        fields = {
            "customer": self.customer,
            "quantity": self.quantity,
            "item": self.item,
            "due": self.due.isoformat(),
        }
        return json.dumps(fields, ensure_ascii=False)


def number_words(number: int) -> str:
    """Return an integer from 0 to 100 in English words."""
    if number == 100:
        return "one hundred"
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens] if ones == 0 else f"{_TENS[tens]}-{_ONES[ones]}"


def plain_number(rng: Random, number: int) -> str:
    """Return a number as digits, or as words if they are short."""
    return number_words(number) if number <= 100 and rng.random() < 0.4 else str(number)


def quantity_phrase(rng: Random, number: int) -> str:
    """Return a text for a quantity before an item: digits, words, or an idiom such as `a dozen`."""
    if number in _IDIOMS and rng.random() < 0.6:
        return rng.choice(_IDIOMS[number])
    return plain_number(rng, number)


def random_quantity(rng: Random) -> int:
    """Return a quantity, mostly small, up to 2,000. Quantities with idioms are common enough to be learned."""
    draw = rng.random()
    if draw < 0.15:
        return rng.choice(tuple(_IDIOMS))
    if draw < 0.75:
        return rng.randint(1, 99)
    return rng.randint(100, 999) if draw < 0.95 else rng.randint(1000, 2000)


def random_date(rng: Random) -> date:
    """Return a day from 2025 to 2029."""
    return _FIRST_DAY + timedelta(days=rng.randint(0, _DAYS))


def ordinal(number: int) -> str:
    """Return a number as 1st, 2nd, 3rd, 4th, 11th, 21st …"""
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def written_date(rng: Random, day: date) -> str:
    """Return a date in a random notation that people cannot misread."""
    month = calendar.month_name[day.month]
    forms = (
        f"{day.day} {month} {day.year}",
        f"{month} {day.day}, {day.year}",
        f"{month} {ordinal(day.day)}, {day.year}",
        f"the {ordinal(day.day)} of {month} {day.year}",
        f"the {ordinal(day.day)} of {month}, {day.year}",
        f"{ordinal(day.day)} {month} {day.year}",
        f"{day.day} {month[:3]} {day.year}",
        f"{calendar.day_name[day.weekday()]}, {day.day} {month} {day.year}",
        f"{calendar.day_name[day.weekday()]}, {month} {day.day}, {day.year}",
        day.isoformat(),
        day.isoformat(),
    )
    return rng.choice(forms)
