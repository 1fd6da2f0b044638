"""Reading: accepted inputs, errors of rows, errors of jobs, and the positions in their messages."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.errors import BatchInferError, InputCorrupt, InputMissing, JobFileError
from batchinfer.core.request import RowError
from batchinfer.filesystem import duck
from batchinfer.input.files import list_inputs
from batchinfer.input.json_text import parse_row
from batchinfer.input.protocol import TextOptions
from batchinfer.input.reader import Reader, SampleSize
from batchinfer.input.sql import materialise, query_columns

GOOD = b'{"a": 1}'


def read(path: Path | str, cap: int = 1 << 24, columns: list[str] | None = None) -> list[Any]:
    """Return all rows of a path, with error codes for bad rows."""
    reader = Reader.open(list_inputs(str(path), Path("/")), TextOptions(cap))
    rows = [row for batch in reader.batches(columns) for row in batch.rows]
    assert len(reader.sha256) == len(reader.files)
    return [row.code if isinstance(row, RowError) else row for row in rows]


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def zst(data: bytes) -> bytes:
    return bytes(pa.compress(data, "zstd", asbytes=True))


@pytest.mark.parametrize(("data", "rows"), [
    (b"", []),
    (b"\n\n  \r\n", []),
    (GOOD, [{"a": 1}]),
    (b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD, [{"a": 1}] * 2),
    (GOOD + b"\n\n\n" + GOOD + b"\n", [{"a": 1}] * 2),
    (b'{"a": "x\\u0000y", "id": "../../etc"}', [{"a": "x\0y", "id": "../../etc"}]),
    (b'{"a": "x\x00y"}', [{"a": "x\0y"}]),
    (b'{"a": 123456789012345678901234567890}', [{"a": 123456789012345678901234567890}]),
    (b'{"a": "\\ud83d\\ude00"}', [{"a": "😀"}]),
])  # fmt: skip
def test_accepted(tmp_path: Path, data: bytes, rows: list[Any]) -> None:
    assert read(write(tmp_path / "x.jsonl", data)) == rows
    assert read(write(tmp_path / "x.jsonl.gz", gzip.compress(data))) == rows
    assert read(write(tmp_path / "x.jsonl.zst", zst(data))) == rows


def test_compressed_files_of_several_members(tmp_path: Path) -> None:
    data = gzip.compress(GOOD + b"\n{") + gzip.compress(b'"a": 2}\n')
    assert read(write(tmp_path / "x.jsonl.gz", data)) == [{"a": 1}, {"a": 2}]
    assert read(write(tmp_path / "x.jsonl.zst", zst(GOOD + b"\n") * 2)) == [{"a": 1}] * 2


@pytest.mark.parametrize(("line", "code"), [
    (b'{"a": "\xff"}', "bad_utf8"),
    (b'{"a": "\xed\xa0\x80"}', "bad_utf8"),
    (b'{"a": "\\ud800"}', "lone_surrogate"),
    (b'{"\\udfff": 1}', "lone_surrogate"),
    (b"{", "bad_json"),
    (b'{"a": 1} x', "bad_json"),
    (b"{'a': 1}", "bad_json"),
    (b'{"a": ' + b"9" * 5000 + b"}", "bad_json"),
    (b'{"a": NaN}', "nan"),
    (b'{"a": [-Infinity]}', "nan"),
    (b'{"a": 1e999}', "nan"),
    (b'{"a": 1, "a": 2}', "duplicate_keys"),
    (b'{"a": {"b": 1, "b": 1}}', "duplicate_keys"),
    (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nesting"),
    (b"[" * 100_000, "nesting"),
    (b'{"a": "' + b"x" * 2000 + b'"}', "line_too_long"),
    (b"[1]", "not_an_object"),
    (b"null", "not_an_object"),
    (b'"text"', "not_an_object"),
])  # fmt: skip
def test_a_bad_row_costs_one_row(tmp_path: Path, line: bytes, code: str) -> None:
    path = write(tmp_path / "x.jsonl", b"\n".join([GOOD, line, GOOD]))
    cap = 1000 if code == "line_too_long" else 1 << 24
    assert read(path, cap) == [{"a": 1}, code, {"a": 1}]


def test_brackets_in_text_are_no_nesting(tmp_path: Path) -> None:
    assert parse_row(json.dumps({"a": '[{\\"' * 100}).encode()) == {"a": '[{\\"' * 100}
    assert parse_row(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")["a"]


def test_messages_name_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", GOOD + b"\n\n" + b'{"secret words": oops}\n{"text": "cut')
    files = list_inputs(str(path), tmp_path)
    errors = [r for b in Reader.open(files).batches() for r in b.rows if isinstance(r, RowError)]
    assert "x.jsonl line 3" in errors[0].message
    assert "secret" not in errors[0].message
    assert "x.jsonl line 4: Unterminated string starting at character 10 of the line" in errors[1].message


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def parquet_bytes(table: pa.Table, **kind: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True, **kind)
    return bytes(sink.getvalue())


def arrow_bytes(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    return sink.getvalue()


TYPED = {"parquet": parquet_bytes, "arrow": arrow_bytes}
TABLE = pa.table({"a": list(range(1000)), "t": [f"text {i}" for i in range(1000)]})
LONG = b"\n".join([GOOD] * 5000)


@pytest.mark.parametrize(("name", "data", "words"), [
    ("cut.jsonl.gz", gzip.compress(os.urandom(1000).hex().encode() + LONG)[:-100], "damaged gzip"),
    ("crc.jsonl.gz", flipped(gzip.compress(LONG), -6), "damaged gzip"),
    ("cut.jsonl.zst", zst(LONG)[:-3], "damaged zstd"),
    ("no.jsonl.gz", GOOD, "the content is not gzip"),
    ("bom.jsonl", GOOD.decode().encode("utf-16"), "UTF-16"),
    ("le.jsonl", GOOD.decode().encode("utf-16-le"), "UTF-16"),
    ("be.jsonl", GOOD.decode().encode("utf-16-be"), "UTF-16"),
    ("no.parquet", GOOD * 10, "Parquet"),
    ("empty.parquet", b"", "Parquet"),
    ("cut.parquet", parquet_bytes(TABLE)[:-20], "Parquet"),
    ("page.parquet", flipped(parquet_bytes(TABLE, compression="none"), 1500), "damaged after row 0"),
])  # fmt: skip
def test_a_damaged_file_stops_the_job(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = write(tmp_path / name, data)
    with pytest.raises(InputCorrupt, match=words) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 65


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", LONG)
    batches = Reader.open(list_inputs(str(path), tmp_path)).batches()
    next(batches)
    with path.open("ab") as file:
        file.write(GOOD)
    with pytest.raises(InputCorrupt, match="changed while it was read"):
        list(batches)


def form_bytes(form: str, letter: str) -> bytes:
    """Return 2,000 rows as bytes, with the same size for every letter."""
    table = pa.table({"a": [letter * 9] * 2000, "n": list(range(2000))})
    if form == "csv":
        return b"a,n\n" + b"".join(b"%b,%d\n" % (letter.encode() * 9, n) for n in range(2000))
    if form == "jsonl":
        return b"".join(json.dumps({"a": letter * 9, "n": n}).encode() + b"\n" for n in range(2000))
    return TYPED[form](table)


def edited(path: Path, data: bytes) -> None:
    """Rewrite a file and restore its old time."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "arrow"])
def test_an_edit_with_the_old_size_and_time_is_noticed(tmp_path: Path, form: str) -> None:
    path = write(tmp_path / f"x.{form}", form_bytes(form, "a"))
    reader = Reader.open(list_inputs(str(path), tmp_path))
    batches = reader.batches()
    next(batches)
    edited(path, form_bytes(form, "b"))
    with pytest.raises(InputCorrupt, match=r"changed while it was read, with the same size|damaged"):
        list(batches)
    read_whole = Reader.open(list_inputs(str(path), tmp_path))
    list(read_whole.batches())
    (file,) = read_whole.files
    edited(path, form_bytes(form, "c"))
    with pytest.raises(InputCorrupt, match="changed"):
        file.check_unchanged(read_whole.sha256[str(path)])


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    """Copied, restored or linked files have another inode or ctime, and are not read again."""
    data = form_bytes("jsonl", "a")
    path = write(tmp_path / "x.jsonl", data)
    reader = Reader.open(list_inputs(str(path), tmp_path))
    assert sum(len(batch.rows) for batch in reader.batches()) == 2000
    (file,) = reader.files
    path.chmod(0o600)
    file.check_unchanged(reader.sha256[str(path)])
    path.rename(tmp_path / "old")
    write(path, data)
    file.check_unchanged(reader.sha256[str(path)])
    with pytest.raises(InputCorrupt, match="changed"):
        file.check_unchanged()  # nothing tells what was read


def test_schemas_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "d" / "a.parquet", parquet_bytes(TABLE))
    write(tmp_path / "d" / "b.parquet", parquet_bytes(TABLE.select(["t", "a"])))
    assert len(read(tmp_path / "d")) == 2000
    write(tmp_path / "d" / "c.parquet", parquet_bytes(TABLE.select(["t"])))
    with pytest.raises(InputCorrupt, match=r"c\.parquet: column 'a'"):
        read(tmp_path / "d")


def test_one_format_a_job(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.parquet", parquet_bytes(TABLE))
    with pytest.raises(InputCorrupt, match="one format"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["gone.jsonl", "*.jsonl", "empty"])
def test_missing_input(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty" / "notes.txt", b"x")
    with pytest.raises(InputMissing) as caught:
        read(tmp_path / name)
    assert caught.value.exit_code == 66


def test_folders_are_sorted_and_hidden_files_skipped(tmp_path: Path) -> None:
    for number, name in enumerate(["b.jsonl", "a/z.jsonl.gz", ".hidden.jsonl", ".h/x.jsonl", "c.txt"]):
        row = json.dumps({"n": number}).encode()
        write(tmp_path / name, gzip.compress(row) if name.endswith("gz") else row)
    assert [r["n"] for r in read(tmp_path)] == [1, 0]
    assert [r["n"] for r in read(f"{tmp_path}/**/*.jsonl*")] == [1, 0]
    assert [f.name for f in list_inputs(str(tmp_path), tmp_path)] == ["a/z.jsonl.gz", "b.jsonl"]


def test_a_huge_line_is_one_error_row_in_bounded_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl.gz", gzip.compress(GOOD + b"\n" + b"x" * (16 << 20) + b"\n" + GOOD, 1))
    tracemalloc.start()
    assert read(path, 1 << 20) == [{"a": 1}, "line_too_long", {"a": 1}]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20


@pytest.mark.slow
def test_a_small_file_that_decodes_to_gigabytes(tmp_path: Path) -> None:
    """Up to a thousand times the file's size is read, in bounded memory."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * (1 << 20)]))
    noise = pa.array([os.urandom(2000) for _ in range(3000)])
    table = pa.table({"a": values, "b": noise})
    path = write(tmp_path / "x.parquet", parquet_bytes(table, compression="zstd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = Reader.open(list_inputs(str(path), tmp_path)).batches()
    assert sum(len(batch.rows) for batch in batches) == 3000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_invalid_utf8_is_one_error_row(tmp_path: Path, form: str) -> None:
    table = pa.table({"t": pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())})
    path = write(tmp_path / f"x.{form}", TYPED[form](table))
    assert read(path) == [{"t": "good"}, "bad_utf8", {"t": "fine"}]


def queried(folder: Path, sql: str) -> list[Any]:
    file = materialise(sql, folder / "job.yaml", folder / "scratch" / "sql.parquet")
    assert file.name == "sql"
    return [row for batch in Reader.open([file]).batches() for row in batch.rows]


def test_sql_runs_in_the_folder_of_the_job_file(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", parquet_bytes(TABLE))
    sql = "select a, a::hugeint * 10::hugeint ** 20 as big from 'x.parquet' order by a desc -- last first\n;"
    rows = queried(tmp_path, sql)
    assert [r["a"] for r in rows] == list(range(999, -1, -1))


@pytest.mark.parametrize("sql", [
    "select 1 as a; -- all of it",
    "select 1 as a ; /* ; */ ; -- x",
    "-- ;\nselect 1 as a -- ;",
    "select 1 as a /* ü; */;;",
    "from (values (1)) t(a);\n\n-- end",
])  # fmt: skip
def test_what_follows_a_query_is_no_part_of_it(tmp_path: Path, sql: str) -> None:
    assert queried(tmp_path, sql) == [{"a": 1}]
    assert query_columns(sql, tmp_path / "job.yaml") == ["a"]


def test_a_semicolon_within_a_query_stays(tmp_path: Path) -> None:
    assert queried(tmp_path, "select ';--' as \"ü;\", $$a;b$$ as b; -- ;") == [{"ü;": ";--", "b": "a;b"}]


SECRETS = pa.table({"secret": [1]})


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["SECRETS", "GOOD", "described", "columns", "statements"])
def test_variables_of_this_program_are_no_tables(tmp_path: Path, name: str) -> None:
    local = SECRETS
    for used in (name, "local"):
        with pytest.raises(JobFileError, match="does not exist"):
            queried(tmp_path, f"select * from {used}")
        with pytest.raises(JobFileError, match="does not exist"):
            query_columns(f"select * from {used}", tmp_path / "job.yaml")
    with duck.connection(tmp_path / "state" / "spill") as database, pytest.raises(duckdb.CatalogException):
        database.execute("select * from SECRETS")
    assert local is SECRETS


@pytest.mark.parametrize(
    "sql", ["select 1 as a, 2 as a", "select 1 as a, 2 as A", "select *, 1 as a from (select 2 as a)"]
)
def test_two_columns_of_one_name_in_a_query(tmp_path: Path, sql: str) -> None:
    for ask in (lambda: query_columns(sql, tmp_path / "job.yaml"), lambda: queried(tmp_path, sql)):
        with pytest.raises(JobFileError, match=r"input\.sql: two columns have one name: 'a' and '[aA]'"):
            ask()


def doubled(kind: str) -> pa.Table:
    values = [pa.array([1]), pa.array([2])]
    if kind == "columns":
        return pa.Table.from_arrays(values, names=["a", "a"])
    struct = pa.StructArray.from_arrays(values, names=["a", "a"])
    return pa.table({"s": struct if kind == "struct" else pa.ListArray.from_arrays([0, 1], struct)})


@pytest.mark.parametrize("kind", ["columns", "struct", "list of structs"])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, kind: str, form: str) -> None:
    path = write(tmp_path / f"x.{form}", TYPED[form](doubled(kind)))
    with pytest.raises(InputCorrupt, match=rf"x\.{form}: two .* have the name 'a'; give each its own"):
        read(path)


@pytest.mark.parametrize("name", [b"column", b"inside"])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_names_that_are_not_utf8(tmp_path: Path, name: bytes, form: str) -> None:
    table = pa.table({"column": [1], "s": [{"inside": 1}]})
    data = parquet_bytes(table, store_schema=False) if form == "parquet" else arrow_bytes(table)
    path = write(tmp_path / f"x.{form}", data.replace(name, b"\xff" + name[1:]))
    with pytest.raises(InputCorrupt, match=rf"x\.{form}: the name of a column is not UTF-8"):
        read(path)


@pytest.mark.parametrize("sql", ["select a from b", "selec 1", "select 1; select 2", "create table t(a int)"])
def test_a_failing_query_is_a_mistake_in_the_job(tmp_path: Path, sql: str) -> None:
    with pytest.raises(JobFileError, match=r"input\.sql") as caught:
        queried(tmp_path, sql)
    assert caught.value.exit_code == 78


@given(
    st.lists(st.binary(max_size=60).filter(lambda b: b"\n" not in b), max_size=8),
    st.sampled_from(["plain", "gz", "zst"]),
)
def test_good_rows_around_bad_ones_survive(tmp_path_factory: Any, lines: list[bytes], kind: str) -> None:
    marked = [json.dumps({"n": n}).encode() for n in range(len(lines) + 1)]
    later = zip(lines, marked[1:], strict=True)
    data = marked[0] + b"".join(b"\n" + line + b"\n" + mark for line, mark in later)
    path = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    path.write_bytes({"gz": gzip.compress, "zst": zst, "plain": bytes}[kind](data))
    rows = [row["n"] for row in read(path) if isinstance(row, dict) and "n" in row]
    assert rows == list(range(len(lines) + 1))


@given(st.binary(max_size=200))
def test_any_file_is_rows_or_an_error_of_ours(tmp_path_factory: Any, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst", "x.parquet"):
        code = 65
        try:
            read(write(folder / name, data))
        except BatchInferError as error:
            code = error.exit_code
        assert code == 65


@pytest.mark.parametrize("form", ["jsonl", "csv", "csv with newlines in quotes"])
def test_a_sample_of_long_lines_holds_whole_rows_only(tmp_path: Path, form: str) -> None:
    """Lines exceed the read size. A line cut by the end of the sample is skipped."""
    text = "x" * 400_000
    if form == "jsonl":
        path = write(tmp_path / "in.jsonl", (json.dumps({"a": text}).encode() + b"\n") * 60)
    else:
        value = "\n".join([text[:200_000]] * 2) if "quotes" in form else text
        path = write(tmp_path / "in.csv", b"a\n" + f'"{value}"\n'.encode() * 60)
    reader = Reader.open(list_inputs(str(path), tmp_path), sample=SampleSize(512))
    rows = [row for batch in reader.batches() for row in batch.rows]
    assert [row for row in rows if isinstance(row, RowError)] == []
    assert 10 < len(rows) < 60
    assert not reader.complete
    assert reader.sha256 == {}


def test_a_sample_of_a_short_file_is_the_whole_file(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD + b"\n" + GOOD)
    reader = Reader.open(list_inputs(str(path), tmp_path), sample=SampleSize(512))
    assert [row for batch in reader.batches() for row in batch.rows] == [{"a": 1}] * 2
    assert reader.complete


def test_a_row_longer_than_a_sample_tells_the_shape(tmp_path: Path) -> None:
    request = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": ["x" * 500]},
    }
    path = write(tmp_path / "in.jsonl", json.dumps(request).encode() + b"\n")
    assert Reader.open(list_inputs(str(path), tmp_path), sample=SampleSize(512, 100)).shape() == "openai"
