"""Damaged copies of a JSON file, as from downloads, editors and other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
DEEP = 100_000
# JSON texts that replace a value. Python's own parser reads NaN, and numbers without a limit.
VALUES = {
    "null": "null",
    "true": "true",
    "zero": "0",
    "minus one": "-1",
    "a fraction": "1.5",
    "2^31": str(2**31),
    "2^32": str(2**32),
    "2^64": str(2**64),
    "1e400": "1e400",
    "a number of 400 digits": "9" * 400,
    "a number of 5,000 digits": "9" * 5000,
    "NaN": "NaN",
    "an empty text": '""',
    "a text": '"x"',
    "half a surrogate": r'"\ud800"',
    "a null byte": r'"\u0000"',
    "an empty list": "[]",
    "lists in lists": "[" * DEEP + "]" * DEEP,
    "200 lists in lists": "[" * 200 + "]" * 200,
    "100,000 numbers": f"[{','.join(['7'] * 100_000)}]",
    "mixed": '[null, "x", {}, [1], 2.5]',
    "an empty object": "{}",
    "an object": '{"content": 5, "type": "x", "name": [1]}',
    "an object of 50,000 keys": "{" + ",".join(f'"k{n}": {n}' for n in range(50_000)) + "}",
}
_MARK = "\u2424 here"  # placeholder of a value until its text is inserted


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged file; `name` describes the damage."""

    name: str
    data: bytes


def mutants(data: bytes) -> Iterator[Mutant]:
    """Yield all damaged copies of a JSON object in UTF-8."""
    yield from file_mutants(data)
    whole = json.loads(data)
    for path in _places(whole):
        at = ".".join(map(str, path))
        for name, text in VALUES.items():
            yield Mutant(f"{at}: {name}", _with(whole, path, text))
        if isinstance(path[-1], str):
            yield Mutant(f"{at}: missing", _without(whole, path))
            yield Mutant(f"{at}: twice", _twice(whole, path))


def file_mutants(data: bytes) -> Iterator[Mutant]:
    """Yield damaged copies of a text file as a whole."""
    half = len(data) // 2
    yield Mutant("empty", b"")
    yield Mutant("cut in the middle", data[:half])
    yield Mutant("cut before its end", data[:-2])
    yield Mutant("zeros", bytes(len(data)))
    yield Mutant("zeros from the middle", data[:half] + bytes(len(data) - half))
    yield Mutant("not UTF-8", data[:half] + b"\xff\xfe" + data[half:])
    yield Mutant("UTF-16", data.decode().encode("utf-16"))
    yield Mutant("a byte order mark", b"\xef\xbb\xbf" + data)
    yield Mutant("something behind", data + b"{}")
    for name, text in VALUES.items():
        yield Mutant(name, text.encode())
    yield Mutant("objects in objects", b'{"a":' * DEEP + b"1" + b"}" * DEEP)


def _places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of values and containers; of lists and long objects only the first ones."""
    if path:
        yield path
    if isinstance(value, dict):
        few = value if len(value) < 60 else list(value)[:2]
        for key in few:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from _places(value[index], (*path, index))


def _copied(whole: Any) -> Any:
    return json.loads(json.dumps(whole))


def _holder(whole: Any, path: Path) -> Any:
    for step in path[:-1]:
        whole = whole[step]
    return whole


def _with(whole: Any, path: Path, text: str) -> bytes:
    other = _copied(whole)
    _holder(other, path)[path[-1]] = _MARK
    return json.dumps(other).replace(json.dumps(_MARK), text).encode()


def _without(whole: Any, path: Path) -> bytes:
    other = _copied(whole)
    del _holder(other, path)[path[-1]]
    return json.dumps(other).encode()


def _twice(whole: Any, path: Path) -> bytes:
    """Return the object with a repeated key and another value."""
    other = _copied(whole)
    holder = _holder(other, path)
    holder[_MARK] = None
    return json.dumps(other).replace(f"{json.dumps(_MARK)}: null", f"{json.dumps(path[-1])}: 3").encode()
