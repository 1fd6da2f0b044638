"""Encodings, delimiters and quotes as job files declare them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import InputCorrupt, JobFileError
from batchinfer.core.request import RowError
from batchinfer.input.files import list_inputs
from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.protocol import TextOptions
from batchinfer.input.reader import Reader
from batchinfer.job import Job, load_job
from batchinfer.job.field_types import ENCODINGS

WORDS = "naïve café"


def rows(path: Path, **options: Any) -> list[Any]:
    reader = Reader.open(list_inputs(str(path), path.parent), TextOptions(**options))
    found = [row for batch in reader.batches() for row in batch.rows]
    return [f"{row.code}: {row.message}" if isinstance(row, RowError) else row for row in found]


@pytest.mark.sample(6)
@pytest.mark.parametrize("encoding", sorted(ENCODINGS))
def test_every_encoding_that_a_job_may_name(tmp_path: Path, encoding: str) -> None:
    text = "é ü ж あ 語 한 Ω 'x' " * 30
    text = text.encode(encoding, "ignore").decode(encoding)
    lines = 1000
    (tmp_path / "x.csv").write_bytes(("id,text\n" + f'"a\n",{text}\n' * lines).encode(encoding))
    assert rows(tmp_path / "x.csv", encoding=encoding) == [{"id": "a\n", "text": text}] * lines
    line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
    (tmp_path / "x.jsonl").write_bytes((line * 10).encode(encoding))
    assert rows(tmp_path / "x.jsonl", encoding=encoding) == [{"text": text}] * 10


def test_invalid_utf8_is_reported_with_its_place_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(f'id,text\n1,fine\n2,"two\n{WORDS}"\n3,fine\n'.encode("latin-1"))
    (tmp_path / "x.jsonl").write_bytes(json.dumps({"a": WORDS}, ensure_ascii=False).encode("latin-1"))
    good, bad, last = rows(tmp_path / "x.csv")
    assert (good["id"], last["id"]) == ("1", "3")
    assert bad.startswith("bad_utf8: x.csv line 3: byte 3 of line 4, 0xef, is not UTF-8")
    assert rows(tmp_path / "x.jsonl")[0].startswith("bad_utf8: x.jsonl line 1: byte 10 of the line, 0xef")
    assert all("input.encoding: latin-1" in said for said in (bad, rows(tmp_path / "x.jsonl")[0]))
    assert [row["text"] for row in rows(tmp_path / "x.csv", encoding="iso8859-1")] == [
        "fine",
        f"two\n{WORDS}",
        "fine",
    ]


def test_a_byte_that_an_encoding_lacks_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a\nb\n\x81\nc\xe9\n")
    found = rows(tmp_path / "x.csv", encoding="cp1252")
    assert found == [
        {"a": "b"},
        "bad_encoding: x.csv line 3: the byte 0x81 of the line is not cp1252, which input.encoding names",
        {"a": "cé"},
    ]


def test_utf16(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(f"a\tb\r\n1\t{WORDS}\r\n".encode("utf-16"))
    assert rows(path, encoding="utf-16") == [{"a": "1", "b": WORDS}]
    with pytest.raises(InputCorrupt, match=r"input\.encoding: utf-16"):
        rows(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputCorrupt, match=r"x\.csv: is not utf-16, as input\.encoding says"):
        rows(path, encoding="utf-16")


def test_any_bytes_in_any_encoding_are_rows_or_refused(tmp_path: Path) -> None:
    source = random.Random(3)
    for encoding in sorted(ENCODINGS):
        for _ in range(10):
            (tmp_path / "x.csv").write_bytes(b"a\n" + source.randbytes(40))
            try:
                found = rows(tmp_path / "x.csv", encoding=encoding)
            except InputCorrupt as error:
                found = [str(error)]
            assert all(isinstance(row, dict) or "x.csv" in row for row in found)


@pytest.mark.parametrize(("options", "data", "row"), [
    ({"delimiter": "|"}, b'a|b\n1|"x|y"\n', {"a": "1", "b": "x|y"}),
    ({"delimiter": ";"}, b"a,x;b\n1;2\n", {"a,x": "1", "b": "2"}),
    ({"delimiter": "\x01"}, b"a\x01b\n1\x012\n", {"a": "1", "b": "2"}),
    ({"quote": "'"}, b"a,b\n'x,''y''',\"\n", {"a": "x,'y'", "b": '"'}),
    ({"quote": None}, b'a,b\n"x,y"\n', {"a": '"x', "b": 'y"'}),
    ({"quote": None, "delimiter": "\\"}, b"a\\b\n]\\^\n", {"a": "]", "b": "^"}),
])  # fmt: skip
def test_dialects(tmp_path: Path, options: dict[str, Any], data: bytes, row: dict[str, str]) -> None:
    (tmp_path / "x.csv").write_bytes(data)
    assert rows(tmp_path / "x.csv", **options) == [row]


def job(tmp_path: Path, options: str, source: str = "path: x.csv") -> Job:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "job.yaml").write_text(
        f"name: j\nmodel: {{path: model}}\ninput:\n  {source}\n  {options}\nprompt: {{user: '{{{{ a }}}}'}}\n"
        "output: {path: out}\n"
    )
    return load_job(tmp_path / "job.yaml")


def test_a_job_file_sets_encoding_delimiter_and_quote(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("a|b\n'é|'|2\n".encode("latin-1"))
    found = job(tmp_path, "encoding: Windows-1252\n  delimiter: '|'\n  quote: \"'\"")
    batches = open_input(found, input_files(found)).batches()
    assert [row for batch in batches for row in batch.rows] == [{"a": "é|", "b": "2"}]


def test_defaults_are_no_part_of_a_jobs_identity(tmp_path: Path) -> None:
    plain = job(tmp_path, "unique_ids: false").identity_json()
    assert "encoding" not in plain
    spelled = job(tmp_path, "encoding: UTF8\n  delimiter: auto\n  quote: '\"'").identity_json()
    assert spelled == plain
    one, other = (job(tmp_path, f"encoding: {name}").identity_json() for name in ("latin-1", "ISO-8859-1"))
    assert one == other != plain


@pytest.mark.parametrize(("options", "source", "words"), [
    ("encoding: latin1x", "path: x.csv", ("line 5: input.encoding", "did you mean latin-1?")),
    ("encoding: rot13", "path: x.csv", ("line 5: input.encoding", "no encoding that can be read")),
    ("encoding: 5", "path: x.csv", ("line 5: input.encoding", "the number 5", "latin-1")),
    ("delimiter: '||'", "path: x.csv", ("line 5: input.delimiter", "one ASCII character")),
    ("delimiter: é", "path: x.csv", ("line 5: input.delimiter", "one ASCII character")),
    ('quote: "\\n"', "path: x.csv", ("line 5: input.quote", "ends no line")),
    ("quote: ','\n  delimiter: ','", "path: x.csv", ("line 5: input.quote", "the same as delimiter")),
    ("delimiter: ';'", "sql: select 1", ("line 5: input.delimiter", "read_csv")),
    ("encoding: latin-1\n  format: parquet", "path: x.csv", ("line 5: input.encoding", "format is parquet")),
    ("quote: none\n  format: jsonl", "path: x.csv", ("line 5: input.quote", "format is jsonl")),
])  # fmt: skip
def test_mistakes(tmp_path: Path, options: str, source: str, words: tuple[str, ...]) -> None:
    with pytest.raises(JobFileError) as caught:
        job(tmp_path, options, source)
    assert all(word in str(caught.value) for word in words), caught.value


def test_csv_options_are_refused_for_other_formats(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n')
    found = job(tmp_path, "delimiter: ';'", "path: x.jsonl")
    with pytest.raises(JobFileError, match=r"input\.delimiter: belongs to CSV, and .*x\.jsonl is JSON lines"):
        open_input(found, input_files(found))
