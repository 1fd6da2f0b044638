"""CSV records compared with Python's csv module, and the cost of adversarial files."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections.abc import Iterator

import pytest

from batchinfer.input.formats import csv_records
from batchinfer.input.formats.csv_dialect import CsvDialect, detect_delimiter
from tests.batchinfer.input.csv_oracle import drawn, expected, found, splits
from tests.examples import everything, examples

PLAIN = CsvDialect(",", '"')
CAP = 16 << 20
CHUNK = 1 << 18


def chunked(data: bytes) -> Iterator[bytes]:
    return (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))


def test_records_equal_those_of_pythons_csv_module() -> None:
    """Each random file is split into chunks in every way."""
    kinds = set[str]()
    for seed in range(examples(300, 20_000)):
        source = random.Random(seed)
        data, dialect, cap = drawn(source)
        wanted = expected(data, dialect, cap)
        kinds.update(row if isinstance(row, str) else "good" for _, row in wanted)
        for chunks in splits(data, source):
            assert found(iter(chunks), dialect, cap) == wanted, (seed, data, dialect, cap, chunks)
    assert kinds == {"good", "bad_csv", "line_too_long"}


WORST = {
    "every line opens a quote that nothing closes": b'x,"a\n',
    "each closes one and opens the next": b'x",",\n',
    "quoted fields that go on": b'y,"a"b,"\n',
    "one record of many lines": b"x\n",
    "doubled quotes": b'""\n',
    "no content": b"\n",
    "carriage returns": b"\r\r\n",
}


def steps(data: bytes) -> int:
    """Return the number of Python calls while reading a file. It grows if lines are read again."""
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        found(chunked(data), PLAIN, CAP)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", WORST)
def test_twice_the_lines_take_twice_the_work(kind: str) -> None:
    head = b'a,b\n1,"' * kind.startswith("one")
    once, twice = (steps(head + WORST[kind] * lines) for lines in (2_001, 4_001))
    assert twice <= 2.2 * once + 200


@pytest.mark.parametrize("kind", WORST)
def test_a_record_of_the_limit_takes_its_bytes_a_few_times(kind: str) -> None:
    size = 1 << (19 if everything() else 17)
    tracemalloc.start()
    for _ in _records(chunked(b'1,"' + WORST[kind] * (size // len(WORST[kind]))), size):
        break
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * size + (4 << 20)


def _records(chunks: Iterator[bytes], cap: int) -> Iterator[csv_records.Found]:
    lines = csv_records.LineBuffer(chunks)
    return iter(csv_records.CsvRecords(lines, PLAIN, cap, lambda: False))


def test_memory_stays_within_the_cap_plus_a_few_chunks() -> None:
    """A gigabyte inside quotes."""
    mebibyte = b"x\n" * (1 << 19)

    def endless() -> Iterator[bytes]:
        yield b'1,"'
        for _ in range(1000):
            yield mebibyte

    tracemalloc.start()
    number, record, _ = next(_records(endless(), 1 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert number == 1
    assert not isinstance(record, bytes)
    assert peak < 8 << 20


@pytest.mark.parametrize(("header", "mark"), [
    (b'"a;b,c";d', ";"),
    (b'"a;b', ","),
    (b"a\tb", "\t"),
    (b"a", ","),
    (b'"' * 100_001 + b";", ","),
    (b'"a"";,";b', ";"),
])  # fmt: skip
def test_the_delimiter_that_the_header_shows(header: bytes, mark: str) -> None:
    assert detect_delimiter(header, '"') == mark
