"""Messages as bytes: JSON, and behind it the bytes of arrays. Reading them makes objects of the classes that messages
consist of, and of no others, and calls nothing of them but what makes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from batchinfer.core.request import Scores, Tokens, Vector
from batchinfer.engine.schedule.step_plan import RankStep
from batchinfer.pipeline.workers import messages
from batchinfer.pipeline.workers.nodes.orders import ORDERS

_LENGTH = struct.Struct(">Q")  # of the JSON, which comes first
_KINDS = "biuf"  # of arrays' values: truth values, integers and floats
_ROOTS = (*messages.ALL, *ORDERS, RankStep, Tokens, Vector, Scores)


def packed(message: object) -> bytes:
    """Return the bytes of a message. Raises TypeError for what is none."""
    writing = _MessageWriting()
    tree = json.dumps(writing.of(message), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(tree)), tree, *writing.blobs])


def unpacked(data: bytes) -> Any:
    """Return the message of these bytes. Raises ValueError for bytes that are of none."""
    if len(data) < _LENGTH.size:
        raise ValueError("it is too short")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ValueError("it is too short")
    try:
        return _MessageReading(memoryview(data)[end:]).of(json.loads(data[_LENGTH.size : end]))
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no message: {error}") from error


@cache
def _classes() -> dict[str, type]:
    """Return all classes that messages consist of, by their names."""
    found: dict[str, type] = {}
    for kind in _ROOTS:
        _add(kind, found)
    return found


def _add(kind: Any, found: dict[str, type]) -> None:
    if not isinstance(kind, type):
        for part in get_args(kind):
            _add(part, found)
    elif _is_record(kind) and kind.__name__ not in found:
        found[kind.__name__] = kind
        for part in get_type_hints(kind).values():
            _add(part, found)


def _is_record(kind: type) -> bool:
    return is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


@cache
def _names(kind: type) -> tuple[str, ...]:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "_fields"))  # noqa: B009 - of a NamedTuple, as `type` does not know


class _MessageWriting:
    """Turns a message into what JSON can hold. Objects that it has several times are written once, as rows mostly share
    their parameters."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # so that no other object gets the number of one that was seen

    def of(self, value: object) -> Any:
        """Return a JSON value: itself, or {kind: content}."""
        if value is None or isinstance(value, bool | str) or type(value) in (int, float):
            return value
        kind = type(value)
        if kind.__name__ in _classes() and _classes()[kind.__name__] is kind:
            return self._record(value, kind)
        if isinstance(value, list):
            return [self.of(one) for one in value]
        return self._other(value)

    def _record(self, value: object, kind: type) -> dict[str, Any]:
        if (number := self._seen.get(id(value))) is not None:
            return {"again": number}
        told = [self.of(getattr(value, name)) for name in _names(kind)]
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return {kind.__name__: told}

    def _other(self, value: object) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return {"array": [self._blob(value.tobytes()), value.dtype.str, [*value.shape]]}
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return {"scalar": [value.dtype.str, value.item()]}
        if isinstance(value, bytes):
            return {"bytes": self._blob(value)}
        if type(value) is tuple:
            return {"tuple": [self.of(one) for one in value]}
        if isinstance(value, dict):
            return {"map": [[self.of(key), self.of(one)] for key, one in value.items()]}
        if isinstance(value, Path):
            return {"path": str(value)}
        raise TypeError(f"messages between machines hold no {type(value).__name__}")

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(data)


class _MessageReading:
    """Makes a message of what JSON holds. `blobs`: the bytes of all arrays, in their order."""

    def __init__(self, blobs: memoryview) -> None:
        self._blobs, self._at = blobs, 0
        self._made: list[object] = []
        self._others: dict[str, Callable[[Any], Any]] = {
            "array": self._array,
            "scalar": _scalar,
            "bytes": lambda length: bytes(self._blob(length)),
            "tuple": lambda values: tuple(self.of(one) for one in values),
            "map": lambda pairs: {self.of(key): self.of(one) for key, one in pairs},
            "path": Path,
            "again": self._again,
        }

    def of(self, value: Any) -> Any:
        """Return what `_MessageWriting.of` was given."""
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if not isinstance(value, dict):
            return value
        ((name, content),) = value.items()
        if (other := self._others.get(name)) is not None:
            return other(content)
        kind = _classes()[name]
        made = kind(**dict(zip(_names(kind), self._values(content), strict=True)))
        self._made.append(made)
        return made

    def _values(self, content: list[Any]) -> Iterator[Any]:
        return (self.of(one) for one in content)

    def _again(self, number: int) -> object:
        return self._made[range(len(self._made))[number]]

    def _blob(self, length: int) -> memoryview:
        begin, self._at = self._at, self._at + length
        if length < 0 or self._at > len(self._blobs):
            raise ValueError("it is too short")
        return self._blobs[begin : self._at]

    def _array(self, content: list[Any]) -> Any:
        length, kind, shape = content
        return np.frombuffer(bytearray(self._blob(length)), _plain(kind)).reshape(shape)


def _plain(kind: str) -> np.dtype[Any]:
    found = np.dtype(kind)
    if found.kind not in _KINDS or found.subdtype is not None:
        raise ValueError(f"it has values of the kind {kind}")
    return found


def _scalar(content: list[Any]) -> Any:
    kind, value = content
    return _plain(kind).type(value)
