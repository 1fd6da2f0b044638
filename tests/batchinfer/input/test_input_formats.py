"""Detection of input formats, and messages about a file in another format."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.orc as orc
import pytest

from batchinfer.core.errors import InputCorrupt
from batchinfer.input.files import list_inputs
from batchinfer.input.format_detection import FORMATS, OPENAI, named_by
from batchinfer.job import InputSection


def test_a_job_may_name_every_format() -> None:
    named = get_args(InputSection.model_fields["format"].annotation)
    assert set(named) == {"auto", OPENAI, *(one.name for one in FORMATS)}


def test_no_two_formats_share_a_name() -> None:
    suffixes = [suffix for one in FORMATS for suffix in one.suffixes]
    assert len(suffixes) == len(set(suffixes))


@pytest.mark.parametrize(("name", "form"), [
    ("a.jsonl", "jsonl"), ("a.NDJSON.gz", "jsonl"), ("a.json.zst", "jsonl"), ("a.parquet", "parquet"),
    ("a.pq", "parquet"), ("a.csv", "csv"), ("a.tsv.gz", "csv"), ("a.arrow", "arrow"), ("a.feather", "arrow"),
    ("a.parquet.gz", None), ("a.xlsx", None), ("csv", None),
])  # fmt: skip
def test_by_name(name: str, form: str | None) -> None:
    found = named_by(name)
    assert (found.name if found else None) == form


def zipped() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("xl/workbook.xml", "<x/>")
    return data.getvalue()


def orc_file() -> bytes:
    data = io.BytesIO()
    orc.write_table(pa.table({"a": [1]}), data)
    return data.getvalue()


@pytest.mark.parametrize(("name", "data", "words"), [
    ("rows.xlsx", zipped(), ("Excel", "save the sheet as CSV")),
    ("rows.orc", orc_file(), ("is ORC", "convert it to Parquet")),
    ("rows.avro", b"Obj\x01\x04", ("is Avro", "Parquet")),
    ("rows.db", b"SQLite format 3\x00" + b"\0" * 90, ("SQLite", "export the table")),
    ("rows.duckdb", b"\0" * 8 + b"DUCK" + b"\0" * 90, ("DuckDB database", "Parquet")),
    ("rows.feather1", b"FEA1\0\0\0\0", ("Feather version 1", "write_feather")),
    ("rows.pkl", b"\x80\x05\x95", ("pickle", "run code")),
    ("rows.jsonl.bz2", b"BZh91AY", ("bzip2", "gzip or zstd")),
    ("rows.jsonl.xz", b"\xfd7zXZ\0", ("xz", "gzip or zstd")),
    ("rows.xml", b"<rows/>", ("XML", "JSON lines")),
    ("rows.txt", b"just words\n", ("neither its name nor its content", "input.format")),
    ("rows.json", b'\n [{"text": "x"}]', ("one JSON array", "jq -c '.[]' rows.json")),
])  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, name: str, data: bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(InputCorrupt) as caught:
        list_inputs(str(path), tmp_path)
    assert all(word in str(caught.value) for word in (name, *words)), caught.value


@pytest.mark.parametrize(("name", "data", "form"), [
    ("rows", b'{"a": 1}', "jsonl"),
    ("rows.txt", b'\xef\xbb\xbf\n {"a": 1}', "jsonl"),
    ("rows.bak", gzip.compress(b"{}", mtime=0), "jsonl"),
    ("empty", b"", "jsonl"),
    ("rows.bin", b"PAR1", "parquet"),
    ("rows.bin", b"ARROW1\0\0", "arrow"),
])  # fmt: skip
def test_by_content(tmp_path: Path, name: str, data: bytes, form: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert [file.format for file in list_inputs(str(tmp_path / name), tmp_path)] == [form]


def test_a_job_may_set_the_format(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_bytes(b"id,text\n1,a\n")
    assert [f.format for f in list_inputs(str(tmp_path / "rows.txt"), tmp_path, "csv")] == ["csv"]
    assert [f.format for f in list_inputs(str(tmp_path / "rows.txt"), tmp_path, OPENAI)] == ["jsonl"]
