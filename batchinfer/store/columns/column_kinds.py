"""Converts JSON values to Arrow values: one class or function per type of column.

A value that the type cannot hold exactly is refused (`Unfit`) and never changed: an integer beyond 64 bits, a number
beyond the range of a float, 30 February. JSON's null and absent properties are null.
"""

from __future__ import annotations

import math
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa

from batchinfer.core.exact_json import write_exactly

_T = TypeVar("_T")
_WRITTEN_DAY = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_FRACTION = re.compile(r"\.(\d+)")


class Unfit(ValueError):
    """An error for a JSON value that its result column cannot hold.

    The message starts with the path of the value in the answer, and does not quote the value.
    """


class Kind(ABC):
    """A type of result column for JSON values: checks values, and converts them to Arrow arrays.

    Attributes:
        type: The Arrow type.
    """

    type: pa.DataType

    @abstractmethod
    def check(self, value: Any, place: str) -> None:
        """Raise Unfit if the column cannot hold a value.

        Args:
            value: A parsed JSON value.
            place: The path of the value in the answer, for the message.
        """

    @abstractmethod
    def array(self, values: Sequence[Any]) -> pa.Array:
        """Convert parsed JSON values, which must have passed `check`, to an Arrow array of the column's type.

        Args:
            values: One value per row. None becomes null.
        """


class Leaf(Kind):
    """A type of column without nested fields, such as text or integer.

    Args:
        kind: The Arrow type.
        convert: Returns a value that pyarrow accepts for the type, or raises ValueError.
    """

    def __init__(self, kind: pa.DataType, convert: Callable[[Any], Any]) -> None:
        self.type, self._convert = kind, convert

    def check(self, value: Any, place: str) -> None:
        """Raise Unfit if the column cannot hold a JSON value, whose path in the answer is `place`."""
        if value is None:
            return
        try:
            self._convert(value)
        except (ValueError, OverflowError) as error:
            raise Unfit(f"{place}: {error}") from None

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Convert JSON values that passed `check` to an Arrow array. None becomes null."""
        converted = [None if value is None else self._convert(value) for value in values]
        if isinstance(self.type, pa.ExtensionType):
            return pa.ExtensionArray.from_storage(self.type, pa.array(converted, self.type.storage_type))
        return pa.array(converted, self.type)


class Enumeration(Kind):
    """A type of column for a fixed set of texts, stored as a dictionary-encoded Arrow array.

    The dictionary of every array has all texts, in the order of the JSON schema.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = pa.array(list(texts), pa.string())
        self._places = {text: place for place, text in enumerate(texts)}
        self.type = pa.dictionary(pa.int32(), pa.string())

    def check(self, value: Any, place: str) -> None:
        """Raise Unfit if a JSON value, whose path in the answer is `place`, is not one of the texts."""
        if value is not None and not (isinstance(value, str) and value in self._places):
            raise Unfit(f"{place}: this is not one of the {len(self._places)} values that the schema lists")

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Convert texts that passed `check` to a dictionary-encoded Arrow array. None becomes null."""
        indices = pa.array([None if v is None else self._places[v] for v in values], pa.int32())
        return pa.DictionaryArray.from_arrays(indices, self._texts)


class ListOf(Kind):
    """A type of column for lists whose items have the same type."""

    def __init__(self, item: Kind) -> None:
        self._item, self.type = item, pa.list_(item.type)

    def check(self, value: Any, place: str) -> None:
        """Raise Unfit if a JSON value with the path `place` is not a list of items that fit."""
        if value is None:
            return
        if not isinstance(value, list):
            raise Unfit(f"{place}: this is not a list")
        for number, one in enumerate(value):
            self._item.check(one, f"{place}[{number}]")

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Convert lists that passed `check` to an Arrow list array. None becomes null."""
        lengths = [0 if value is None else len(value) for value in values]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        items = self._item.array([one for value in values if value is not None for one in value])
        nulls = pa.array([value is None for value in values], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(offsets), items, type=self.type, mask=nulls)


class Struct(Kind):
    """A type of column for JSON objects with known properties. Other properties of a value are left out.

    Args:
        fields: The types of the properties by name.
    """

    def __init__(self, fields: Mapping[str, Kind]) -> None:
        self.fields = dict(fields)
        self.type = pa.struct([(name, kind.type) for name, kind in self.fields.items()])

    def check(self, value: Any, place: str) -> None:
        """Raise Unfit if a JSON value with the path `place` is not an object whose properties fit."""
        if value is None:
            return
        if not isinstance(value, dict):
            raise Unfit(f"{place}: this is not an object")
        for name, kind in self.fields.items():
            kind.check(value.get(name), f"{place}.{name}" if place else name)

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Convert objects that passed `check` to an Arrow struct array. None becomes null."""
        nulls = pa.array([value is None for value in values], pa.bool_())
        return pa.StructArray.from_arrays(self.arrays(values), fields=list(self.type), mask=nulls)

    def arrays(self, values: Sequence[Any]) -> list[pa.Array]:
        """Return an Arrow array for each property of objects that passed `check`.

        Args:
            values: One object per row. None: all properties are null.
        """
        return [
            kind.array([None if value is None else value.get(name) for value in values])
            for name, kind in self.fields.items()
        ]


def text() -> Kind:
    """Return the type of column for texts."""
    return Leaf(pa.string(), _text)


def json_text() -> Kind:
    """Return the type of column that holds any JSON value as text, for values without an Arrow type."""
    return Leaf(pa.string(), write_exactly)


def integer() -> Kind:
    """Return the type of column for 64-bit integers."""
    return Leaf(pa.int64(), _integer)


def number() -> Kind:
    """Return the type of column for 64-bit floats."""
    return Leaf(pa.float64(), _number)


def boolean() -> Kind:
    """Return the type of column for booleans."""
    return Leaf(pa.bool_(), _boolean)


def null() -> Kind:
    """Return the type of column that is always null."""
    return Leaf(pa.null(), _null)


def day() -> Kind:
    """Return the type of column for dates, written YYYY-MM-DD in answers."""
    return Leaf(pa.date32(), _day)


def time_of_day() -> Kind:
    """Return the type of column for times of day in microseconds, converted to UTC."""
    return Leaf(pa.time64("us"), _time)


def moment() -> Kind:
    """Return the type of column for timestamps in microseconds, converted to UTC."""
    return Leaf(pa.timestamp("us", "UTC"), _moment)


def universally_unique() -> Kind:
    """Return the type of column for UUIDs."""
    return Leaf(pa.uuid(), lambda value: _parse(uuid.UUID, _text(value), "a UUID").bytes)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse("text")


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse("true or false")


def _null(value: Any) -> None:
    if value is not None:
        _refuse("null")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        _refuse("a whole number")
    if not -(2**63) <= value < 2**63:  # checked first: 1e1000000000 would be converted to a huge integer
        raise ValueError("the whole number does not fit into 64 bits")
    return int(value) if int(value) == value else _refuse("a whole number")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        _refuse("a number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError("the number is beyond the range of a 64-bit float")
    if value and not found:
        raise ValueError("the number is closer to zero than a 64-bit float can be")
    if isinstance(value, int) and int(found) != value:
        raise ValueError("the whole number has more digits than a 64-bit float can hold")
    return found


def _day(value: Any) -> date:
    said = _text(value)
    _check_day(said)
    return _parse(date.fromisoformat, said, "a date, as YYYY-MM-DD")


def _time(value: Any) -> time:
    said = _parse(time.fromisoformat, _microseconds(_text(value)), "a time of day, as HH:MM:SSZ")
    moved = datetime(2000, 1, 2, tzinfo=UTC) + timedelta(
        hours=said.hour, minutes=said.minute, seconds=said.second, microseconds=said.microsecond
    )
    return (moved - (said.utcoffset() or timedelta())).time()


def _moment(value: Any) -> datetime:
    _check_day(_text(value))
    found = _parse(
        datetime.fromisoformat, _microseconds(_text(value)), "a date and time, as YYYY-MM-DDTHH:MM:SSZ"
    )
    try:
        return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except OverflowError:
        raise ValueError("the date is outside the years 1 to 9999 in UTC") from None


def _check_day(said: str) -> None:
    day = _WRITTEN_DAY.match(said)
    if day is None:
        return
    try:
        date.fromisoformat(day[0])
    except ValueError:
        year, month, number = day.groups()
        raise ValueError(f"there is no day {number} in month {month} of the year {year}") from None


def _parse(parse: Callable[[str], _T], said: str, what: str) -> _T:
    try:
        return parse(said)
    except ValueError:  # its message quotes the text
        raise ValueError(f"this is not {what}") from None


def _microseconds(said: str) -> str:
    # Raises ValueError for more than six decimals, as microseconds cannot hold them
    fraction = _FRACTION.search(said)
    if fraction and fraction[1][6:].strip("0"):
        raise ValueError("the time has more than six decimals")
    return said.upper()


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"this is not {what}")
