"""Runs of rows: they are read as the rows of their chunk are, and equal ones read alike wherever they stand."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.data.input.chunk import InputChunk
from batchinfer.data.input.digests.row_digest import DIGEST_BYTES
from batchinfer.data.input.digests.runs import Runs
from batchinfer.data.input.formats.csv_dialect import CsvDialect
from batchinfer.data.input.formats.csv_table import CsvLines
from batchinfer.data.input.formats.jsonl import JsonLines
from batchinfer.data.input.typed_rows import table_rows
from tests.examples import examples

Rows = list[dict[str, Any]]
TEXTS = st.one_of(
    st.sampled_from(["", "a", "é", 'say "hi"', "two\nlines", "a,b", "\r", " "]), st.text(max_size=20)
)
ROWS = st.lists(
    st.fixed_dictionaries({"id": st.integers(0, 9), "text": TEXTS, "none": st.none() | TEXTS}), max_size=120
)


def json_lines(rows: Rows, line: int = 1) -> JsonLines:
    data = "".join(json.dumps(row) + "\n" + ("\n" if row["id"] == 7 else "") for row in rows).encode()
    return JsonLines(
        file="x", bytes_read=0, most_rows=len(rows), data=data, line=line, cap=1000, encoding="utf-8"
    )


def csv_lines(rows: Rows, line: int = 1) -> CsvLines:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(list(row.values()) for row in rows)
    return CsvLines(
        file="x",
        bytes_read=0,
        most_rows=len(rows),
        columns=3,
        kept=((0, "id"), (1, "text"), (2, "none")),
        dialect=CsvDialect(",", '"'),
        cap=1000,
        encoding="utf-8",
        line=line,
        data=text.getvalue().encode("utf-8"),
    )


def typed(rows: Rows, line: int = 1) -> InputChunk:
    schema = pa.schema([("id", pa.int32()), ("text", pa.string()), ("none", pa.large_string())])
    more = pa.RecordBatch.from_pylist([{"id": 1, "text": "before", "none": None}, *rows], schema)
    return table_rows("x", more.slice(1), line, 0)


CHUNKS: dict[str, Callable[..., InputChunk]] = {"jsonl": json_lines, "csv": csv_lines, "typed": typed}


def runs_of(chunk: InputChunk) -> Runs | None:
    return chunk.runs(None)


def every(runs: Runs) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(len(runs.digests) // DIGEST_BYTES)


@pytest.mark.parametrize("form", CHUNKS)
@settings(max_examples=examples(25, 60), deadline=None)
@given(rows=ROWS, wanted=st.sets(st.integers(0, 30)))
def test_runs_have_the_rows_of_their_chunk(form: str, rows: Rows, wanted: set[int]) -> None:
    chunk = CHUNKS[form](rows, line=5)
    runs = runs_of(chunk)
    if runs is None:
        assert not rows or form == "csv"
        return
    all_rows, digests = chunk.digested()
    opened = runs.opened(every(runs))
    assert [*opened.rows] == [*all_rows] == [*chunk.read()]
    assert opened.digests == digests
    ends = np.cumsum(opened.sizes)
    which = np.array(sorted(wanted & {*every(runs).tolist()}), np.int64)
    some = runs.opened(which)
    assert some.sizes.tolist() == opened.sizes[which].tolist()
    own = [at for one in which.tolist() for at in range(ends[one] - opened.sizes[one], ends[one])]
    assert [*some.rows] == [all_rows[at] for at in own]
    assert some.digests == b"".join(digests[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)] for at in own)


@pytest.mark.parametrize("form", CHUNKS)
@settings(max_examples=examples(25, 60), deadline=None)
@given(rows=ROWS, other=ROWS, cut=st.integers(0, 120))
def test_equal_runs_read_alike(form: str, rows: Rows, other: Rows, cut: int) -> None:
    """The other chunk begins elsewhere, and has some of the same rows."""
    found = dict[bytes, Sequence[Any]]()
    for chunk in (CHUNKS[form](rows), CHUNKS[form](other + rows[cut:], line=9)):
        runs = runs_of(chunk)
        for number in [] if runs is None else every(runs).tolist():
            assert runs is not None
            digest = runs.digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
            own = [row for row in runs.opened(np.array([number])).rows if isinstance(row, dict)]
            assert found.setdefault(digest, own) == own


@pytest.mark.parametrize("form", ["jsonl", "csv"])
@settings(max_examples=examples(25, 60), deadline=None)
@given(rows=ROWS)
def test_the_last_line_needs_no_end(form: str, rows: Rows) -> None:
    chunk = CHUNKS[form](rows)
    chunk = replace(chunk, data=chunk.data.rstrip(b"\n"))
    runs = runs_of(chunk)
    if runs is not None:
        assert [*runs.opened(every(runs)).rows] == [*chunk.read()]


@pytest.mark.parametrize("form", CHUNKS)
def test_most_runs_are_found_behind_rows_that_were_inserted(form: str) -> None:
    dice = random.Random(1)
    rows: Rows = [{"id": n, "text": f"row {n * 7919 % 100003}", "none": None} for n in range(4000)]
    changed = [row if dice.random() > 0.01 else row | {"text": "other " + str(row["id"])} for row in rows]
    changed.insert(17, {"id": 1, "text": "new", "none": None})
    before, now = (runs_of(CHUNKS[form](one)) for one in (rows, changed))
    assert before is not None
    assert now is not None
    digests = {before.digests[at : at + DIGEST_BYTES] for at in range(0, len(before.digests), DIGEST_BYTES)}
    assert len(digests) == pytest.approx(500, rel=0.2)
    sizes = now.opened(every(now)).sizes
    known = [
        now.digests[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)] in digests for at in every(now).tolist()
    ]
    assert sizes[np.array(known)].sum() > 0.75 * len(rows)
    assert sizes.max() <= 64


def test_equal_rows_end_a_run_in_time() -> None:
    for text in ("a", "b", "c", "d", "e"):
        runs = runs_of(json_lines([{"id": 1, "text": text, "none": None}] * 300))
        assert runs is not None
        assert runs.opened(every(runs)).sizes.max() <= 64


@pytest.mark.parametrize(
    "data",
    [
        b'1,a,5" wide\n2,b,"x\ny"\n',  # the mark stands alone in a field without quotes
        b'1,a,""x\n',
        b'1,"a",b\n2,"c""\n3",d\n4,e",f\n',
    ],
)
def test_quotes_within_fields_are_not_counted(data: bytes) -> None:
    assert CsvDialect(",", '"').record_ends(data) is None


TYPED = {
    "an integer": pa.array([0, 1, None, 3], pa.int64()),
    "a null and a zero": pa.array([None, 0, 0, None], pa.int64()),
    "truth": pa.array([True, None, False, True]),
    "real numbers": pa.array([0.0, -0.0, float("nan"), None], pa.float32()),
    "texts": pa.array(["", None, "ab", "c"]),
    "texts cut elsewhere": pa.array(["a", None, "b", "c"]),
    "bytes": pa.array([b"", b"\0", None, b"ab"]),
    "times": pa.array([1000, None, 2000, 3000], pa.timestamp("ns", "UTC")),
    "a dictionary": pa.array(["x", "y", None, "x"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", TYPED)
def test_every_value_counts(name: str) -> None:
    """Each row of a column differs from the others by its run alone, and stands for itself in a slice."""
    column = TYPED[name]
    other = pa.array(["k"] * 4)
    found = set()
    for at in range(len(column)):
        batch = pa.record_batch({"a": column, "b": other})
        runs = runs_of(table_rows("x", batch.slice(at, 1), 0, 0))
        alone = runs_of(
            table_rows("x", pa.record_batch({"a": column.take([at]), "b": other.slice(0, 1)}), 0, 0)
        )
        assert runs is not None
        assert alone is not None
        assert runs.digests == alone.digests
        found.add(runs.digests)
    rows = [*table_rows("x", pa.record_batch({"a": column}), 0, 0).read()]
    assert len(found) == len({repr(row) for row in rows})


def test_tables_of_other_types_have_no_runs() -> None:
    lists = pa.record_batch({"a": pa.array([[1], [2, 3]])})
    assert runs_of(table_rows("x", lists, 0, 0)) is None
    assert table_rows("x", pa.record_batch({"a": pa.array([[1]]), "b": ["x"]}), 0, 0).runs(["b"]) is not None
