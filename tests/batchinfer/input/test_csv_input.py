"""CSV: accepted inputs, errors of rows, errors of jobs."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import InputCorrupt, JobFileError
from batchinfer.core.request import RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.files import list_inputs
from batchinfer.input.reader import Reader
from tests.batchinfer.input.test_reader import read, write, zst
from tests.batchinfer.store.index.ingest_kit import carried, checkpoint, make_job, prompts_of, rows_of, run

HEAD = b"id,text\n"


def row(name: str, text: str | None) -> dict[str, Any]:
    return {"id": name, "text": text}


@pytest.mark.parametrize(("data", "rows"), [
    (b"", []),
    (b"\n \r\n", []),
    (HEAD, []),
    (HEAD + b"1,a\n2,b", [row("1", "a"), row("2", "b")]),
    (b"\xef\xbb\xbfid,text\r\n1,a\r\n\r\n2,b\r\n", [row("1", "a"), row("2", "b")]),
    (HEAD + b'"1","say ""hi"", twice"\n', [row("1", 'say "hi", twice')]),
    (HEAD + b'1,"two\nlines"\n2,"\r\n"\n', [row("1", "two\nlines"), row("2", "\r\n")]),
    (HEAD + b'1,5" pipe\n', [row("1", '5" pipe')]),
    (HEAD + b'007,\n 1 ,""\n', [row("007", None), row(" 1 ", None)]),
    (HEAD + "1,Grüße 漢字 🙂\n".encode(), [row("1", "Grüße 漢字 🙂")]),
    (HEAD + b"1,a\0b\n", [row("1", "a\0b")]),
    (b"id;text\n1;a,b\n", [row("1", "a,b")]),
    (b"id\ttext\n1\ta\n", [row("1", "a")]),
    (b'"id,x";text\n1;a\n', [{"id,x": "1", "text": "a"}]),
    (b"text\na b\n\nc\n", [{"text": "a b"}, {"text": "c"}]),
    (b",text\n1,a\n", [{"column0": "1", "text": "a"}]),
    (HEAD + b"1," + b"x" * 300_000 + b"\n", [row("1", "x" * 300_000)]),
])  # fmt: skip
def test_accepted(tmp_path: Path, data: bytes, rows: list[Any]) -> None:
    assert read(write(tmp_path / "x.csv", data)) == rows
    assert read(write(tmp_path / "x.csv.gz", gzip.compress(data))) == rows
    assert read(write(tmp_path / "x.csv.zst", zst(data))) == rows


@pytest.mark.parametrize("name", ["x.tsv", "x.tab", "X.TSV.GZ"])
def test_tabs_by_name(tmp_path: Path, name: str) -> None:
    data = b"id\ttext,more\n1\ta,b\n"
    compressed = gzip.compress(data) if name.endswith("GZ") else data
    assert read(write(tmp_path / name, compressed)) == [{"id": "1", "text,more": "a,b"}]


@pytest.mark.parametrize(("record", "code"), [
    (b"1", "bad_csv"),
    (b"1,2,3", "bad_csv"),
    (b'1,"a"b', "bad_csv"),
    (b'1,"never closed', "bad_csv"),
    (b'1,"never closed\xff', "bad_csv"),
    (b"1,a\rb", "bad_csv"),
    (b"1,\xff", "bad_utf8"),
    (b"1,\xed\xa0\x80", "bad_utf8"),
    (b"1," + b"x" * 2000, "line_too_long"),
    (b'1,"' + b"y\n" * 1000 + b'"', "line_too_long"),
])  # fmt: skip
def test_a_bad_record_costs_one_row(tmp_path: Path, record: bytes, code: str) -> None:
    path = write(tmp_path / "x.csv", HEAD + b"1,a\n" + record + b"\n2,b\n3,c\n")
    found = read(path, 1000)
    assert found[:2] == [row("1", "a"), code]
    assert found[-2:] == [row("2", "b"), row("3", "c")]
    if record.count(b"\n") == 0:
        assert len(found) == 4


def test_messages_name_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", HEAD + b'1,"two\nlines"\n\n2,secret,words\n3,"open\n4,x\n')
    reader = Reader.open(list_inputs(str(path), tmp_path))
    errors = [r for batch in reader.batches() for r in batch.rows if isinstance(r, RowError)]
    assert [error.message for error in errors] == [
        "x.csv line 5: 3 fields, where the header has 2",
        "x.csv line 6: a quote is opened and never closed",
    ]


@pytest.mark.parametrize(("data", "words"), [
    (b"id,id\n1,2\n", ("'id' twice", "input.sql")),
    (b"," * 100_000 + b"\n1\n", ("names 100,001 columns; at most 100,000",)),
    (b'"id\n1,2\n', ("header in line 1", "never closed")),
    (b"i\xff\n1\n", ("header in line 1", "byte 2 of the line, 0xff, is not UTF-8", "input.encoding: latin-1")),
    (b"id,text\r1,a\r2,b\r", ("carriage return",)),
    ("id,text\n".encode("utf-16"), ("UTF-16", "input.encoding: utf-16", "iconv")),
    (b"x" * 5000 + b"\n1\n", ("header", "limit")),
])  # fmt: skip
def test_refused(tmp_path: Path, data: bytes, words: tuple[str, ...]) -> None:
    with pytest.raises(InputCorrupt) as caught:
        read(write(tmp_path / "x.csv", data), 10**6 if data.startswith(b",") else 1000)
    assert all(word in str(caught.value) for word in ("x.csv", *words)), caught.value


def test_headers_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", HEAD + b"1,a\n")
    write(tmp_path / "b.csv", b"text,id\nb,2\n")
    write(tmp_path / "c.csv", b"")
    files = list_inputs(str(tmp_path), tmp_path)
    rows = [r for batch in Reader.open(files).batches() for r in batch.rows]
    assert rows == [row("1", "a"), row("2", "b")]
    write(tmp_path / "d.csv", b"id,body\n")
    with pytest.raises(InputCorrupt, match=r"d.csv: column 'text': no such column, but string in .*a.csv"):
        Reader.open(list_inputs(str(tmp_path), tmp_path))


def test_columns_parameters_and_ids(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    data = b"id,text,most,warm,n\n1,a,5,,007\n2,b,,0.5,\n3,c,many,1,x\n4\n5,d,7,TRUE,y\n"
    job = make_job(
        tmp_path,
        prompt={"user": "{{ text }}"},
        columns=("n", "text"),
        path=str(write(tmp_path / "x.csv", data)),
        id="id",
        sampling={"from_columns": {"max_tokens": "most", "temperature": "warm"}},
    )
    index = run(job)
    rows = rows_of(index)
    assert [r["error_code"] for r in rows] == [None, None, "bad_parameter", "bad_csv", "bad_parameter"]
    assert [r["custom_id"] for r in rows] == ["1", "2", "3", None, "5"]
    found = [SamplingParams.from_json(r["params"]) for r in rows[:2]]
    assert [(p.max_tokens, p.temperature) for p in found] == [(5, 0.0), (256, 0.5)]
    assert carried(index).drop(["row_id"]).to_pydict() == {
        "n": ["007", None, "x", None, "y"],
        "text": ["a", "b", "c", None, "d"],
    }


def test_messages_and_token_ids_are_json(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    path = write(tmp_path / "x.csv", b'ids\n"[5, 6]"\nfive\n[]\n')
    index = run(make_job(tmp_path, prompt={"token_ids": "ids"}, path=str(path)))
    assert [r["error_code"] for r in rows_of(index)] == [None, "bad_json", "empty_prompt"]
    assert prompts_of(index)[0] == [5, 6]


def test_a_missing_column_is_a_mistake(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    path = write(tmp_path / "x.csv", HEAD + b"1,a\n")
    with pytest.raises(JobFileError, match=r"no column 'body'; it has: id, text"):
        run(make_job(tmp_path, prompt={"user": "{{ body }}"}, path=str(path)))
