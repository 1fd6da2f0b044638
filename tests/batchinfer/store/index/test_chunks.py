"""The index is equal byte by byte for any input chunks and any number of workers.

Most tests use workers in this process that reply in any order. One test uses real processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import selectors
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import RowError
from batchinfer.input.chunk import ChunkSize, InputChunk
from batchinfer.input.files import list_inputs
from batchinfer.input.prompts import render_pool
from batchinfer.input.prompts.prepare import Preparer, RowPiece
from batchinfer.input.prompts.prepared.rows import PreparedRows
from batchinfer.input.prompts.render_reply import parse_reply, serialize_reply
from batchinfer.input.prompts.render_worker import RenderSpec
from batchinfer.input.protocol import TextOptions
from batchinfer.input.reader import Reader
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.store.index.index import Index
from tests.batchinfer.input.csv_oracle import drawn
from tests.batchinfer.store.index.ingest_kit import carried, checkpoint, make_job, rows_of, run
from tests.examples import examples

SIZES = [ChunkSize(1, 1), ChunkSize(7, 2), ChunkSize(40, 1000), ChunkSize(1000, 3)]
BOM = b"\xef\xbb\xbf"


class LocalWorker:
    """A render worker in this process with the data of a separate process. Its reply comes at a random time."""

    order = random.Random(1)

    def __init__(self, spec: RenderSpec, definition: int, events: selectors.BaseSelector) -> None:
        self._spec, self._events = spec, events
        self._read, self._write = os.pipe()
        self._ready, self._reply = False, None
        tokenizer = Tokenizer(spec.tokenizer, spec.definition)
        self._preparer = Preparer(spec.plan, spec.limits, tokenizer, lambda row: None, spec.fields)
        events.register(self._read, selectors.EVENT_READ, self)
        os.write(self._write, b"rw" if self.order.random() < 0.5 else b"r")

    @property
    def idle(self) -> bool:
        return self._ready and self._reply is None

    def submit(self, chunk: InputChunk, rows: int) -> None:
        header, data = chunk.serialize()
        assert len(pickle.dumps(header)) < 100_000, "large data is sent separately"
        sent = pickle.loads(pickle.dumps(header)).deserialize(data)
        self._reply = serialize_reply(self._preparer.prepare(sent, RowPiece(0, rows)))
        os.write(self._write, b"w" * self.order.choice([1, 1, 2, 5]))

    def attend(self) -> PreparedRows | None:
        """Consume one byte per poll. Reply after the last byte."""
        self._ready = True
        os.read(self._read, 1)
        if self._reply is None or selectors_ready(self._read):
            return None
        reply, self._reply = self._reply, None
        return parse_reply(
            reply, self._spec.fields, self._spec.limits.vocab_size, len(self._spec.plan.ladder)
        )

    def replace_if_silent(self) -> None:
        pass

    def close(self) -> None:
        self._events.unregister(self._read)
        os.close(self._read)
        os.close(self._write)


def selectors_ready(file: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(0))


def read(path: Path, size: ChunkSize | None, text: TextOptions) -> tuple[list[Any], dict[str, str]]:
    """Read all rows through chunks, each sent as to another process, every second one in two pieces."""
    reader = Reader.open(list_inputs(str(path), path.parent), text, chunk=size)
    rows: list[Any] = []
    for number, chunk in enumerate(reader.chunks()):
        header, data = chunk.serialize()
        sent = pickle.loads(pickle.dumps(header)).deserialize(data)
        border = chunk.most_rows // 2 if number % 2 else 0
        found = [*sent.read(0, border), *sent.read(border)]
        assert len(found) <= chunk.most_rows
        rows += found
    return rows, reader.sha256


def jsonl(draw: st.DrawFn) -> bytes:
    """Draw lines of any length, valid, invalid and blank, with any line ends."""
    good = [
        b'{"text": "a"}',
        b'{"text": "%b", "n": 1}' % (b"long " * 30),
        '{"text": "ä漢"}'.encode(),
        b'{"n": null}',
    ]
    bad = [b"", b" \t", b"{", b'{"text": "\xff"}', b"[1]", b'{"text": "\\ud800"}', b"x" * 130]
    lines = draw(st.lists(st.sampled_from(good + bad), max_size=30))
    ends = [draw(st.sampled_from([b"\n", b"\n", b"\r\n"])) for _ in lines]
    data = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    return draw(st.sampled_from([b"", BOM])) + (data if draw(st.booleans()) else data.removesuffix(b"\n"))


def quoted_csv(draw: st.DrawFn) -> bytes:
    """Draw quoted fields that span lines, and sometimes a broken one."""
    field = st.sampled_from([b"a", b"", b'"b"', b'"c\nd"', b'"""e"""', b'"\r\n,"', b'"' + b"x\n" * 40 + b'"'])
    broken = st.sampled_from([b'"f"g', b'"open', b"h\ri", b"1,2,3", b"\xff,k"])
    record = st.one_of(st.tuples(field, field).map(b",".join), broken)
    records = draw(st.lists(st.one_of(st.tuples(field, field).map(b",".join), record), max_size=30))
    data = b"text,n\n" + b"\n".join(records)
    return draw(st.sampled_from([b"", BOM])) + data + draw(st.sampled_from([b"", b"\n", b"\r\n"]))


FILES = {"rows.jsonl": jsonl, "rows.csv": quoted_csv}


@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@settings(max_examples=examples(25, 60), deadline=None)
def test_rows_do_not_depend_on_where_a_file_is_split(name: str, data: st.DataObject) -> None:
    content = FILES[name](data.draw)
    cap = data.draw(st.sampled_from([100, 1 << 24]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        whole = read(path, None, TextOptions(cap))
        for size in SIZES:
            assert read(path, size, TextOptions(cap)) == whole, size
        batches = Reader.open(list_inputs(str(path), path.parent), TextOptions(cap), chunk=SIZES[1]).batches()
        assert [row for batch in batches for row in batch.rows] == whole[0]


def test_csv_rows_do_not_depend_on_chunks(tmp_path: Path) -> None:
    """Uses the files that are compared with Python's csv module elsewhere."""
    for seed in range(100):
        content, dialect, cap = drawn(random.Random(seed))
        path = tmp_path / f"{seed}.csv"
        path.write_bytes(b"a\n" + content)
        text = TextOptions(cap, delimiter=dialect.delimiter, quote=dialect.quote)
        whole = read(path, None, text)
        for size in SIZES:
            assert read(path, size, text) == whole, (seed, size)


def test_a_long_file_is_split_into_many_chunks(tmp_path: Path) -> None:
    """Without reading most of it, also if quotes span lines, and after a broken record."""
    record = b'1,"two\nlines, and ""quotes"""\n'
    (tmp_path / "x.csv").write_bytes(b"a,b\n" + record * 20_000 + b'3,"x"y\n' + record * 20_000)
    reader = Reader.open(list_inputs(str(tmp_path / "x.csv"), tmp_path))
    chunks = list(reader.chunks())
    assert len(chunks) > 30
    assert sum(bool(chunk.data) for chunk in chunks) >= len(chunks) - 2
    rows = [row for chunk in chunks for row in chunk.read()]
    assert len(rows) == 40_001
    assert [n for n, row in enumerate(rows) if isinstance(row, RowError)] == [20_000]


def digests(index: Index) -> dict[str, str]:
    """Return the digests of all index files, without the times in the marker."""
    files = sorted(path for path in index.folder.rglob("*") if path.is_file() and path.name != "index.json")
    return {str(f.relative_to(index.folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def ingested(folder: Path, path: Path, **changes: Any) -> dict[str, str]:
    limit = changes.pop("limit", None)
    job = make_job(
        folder, prompt={"user": "{{ text }}"}, columns=("text", "n"), path=str(path), id="n", limit=limit
    )
    index = run(job, **changes)
    found = digests(index) | {"rows": str(len(rows_of(index)))}
    for file in index.folder.glob("index.json"):
        file.unlink()  # the same input is read again
    return found


@pytest.fixture
def local_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_pool, "RenderWorker", LocalWorker)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("local_workers")
@pytest.mark.parametrize("name", FILES)
@given(data=st.data())
@settings(
    max_examples=examples(3, 6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_index_does_not_depend_on_chunks_and_workers(name: str, data: st.DataObject) -> None:
    content = b"" if name.endswith("csv") else b'{"text": "t", "n": 0}\n'  # a row that has all columns
    content = FILES[name](data.draw) + b"\n" + content
    limit = data.draw(st.sampled_from([None, 1, 5]))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        checkpoint(place / "model")
        path = place / name
        path.write_bytes(content)
        if name.endswith("jsonl") and limit is not None:
            path.write_bytes(b'{"text": "t", "n": 0}\n' + content.removeprefix(BOM))
        whole = ingested(place, path, limit=limit)
        for workers in (1, 2, 7):
            size = data.draw(st.sampled_from(SIZES))
            assert ingested(place, path, limit=limit, workers=workers, chunk=size) == whole, (workers, size)


def test_real_workers_give_the_same_index(tmp_path: Path) -> None:
    """800 rows, more than one batch of the index, in one chunk and in a hundred."""
    checkpoint(tmp_path / "model")
    rows = [{"text": f"row {n} " * (n % 9), "n": n if n % 5 else 'x"y'} for n in range(800)]
    rows[700] = {"text": None, "n": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = ingested(tmp_path, path, workers=1)
    assert ingested(tmp_path, path, workers=3, chunk=ChunkSize(512, 1000)) == whole
    assert whole["rows"] == "800"


@pytest.mark.slow
@pytest.mark.usefixtures("local_workers")
def test_row_groups_of_the_index_end_at_the_same_rows(tmp_path: Path) -> None:
    """With more rows than one group of a Parquet file."""
    checkpoint(tmp_path / "model")
    path = tmp_path / "rows.csv"
    path.write_text("text,n\n" + "".join(f"r{n},{n}\n" for n in range(8600)))
    whole = ingested(tmp_path, path)
    assert whole["rows"] == "8600"
    assert ingested(tmp_path, path, workers=2, chunk=ChunkSize(7000, 999)) == whole


def typed_files(folder: Path) -> Iterator[Path]:
    table = pa.table({"text": ["a", None, "c"] * 400, "n": list(range(1200)), "more": [[1]] * 1200})
    pq.write_table(table, folder / "rows.parquet", row_group_size=700)
    yield folder / "rows.parquet"
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    yield folder / "rows.arrow"


@pytest.mark.slow
@pytest.mark.usefixtures("local_workers")
def test_typed_rows_do_not_depend_on_workers(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    for path in typed_files(tmp_path):
        whole = ingested(tmp_path, path, limit=900)
        assert whole["rows"] == "900"
        assert ingested(tmp_path, path, limit=900, workers=7) == whole


@pytest.mark.usefixtures("local_workers")
def test_invalid_utf8_in_a_carried_column_is_an_error_of_its_row(tmp_path: Path) -> None:
    """Also if the prompt does not read that column."""
    checkpoint(tmp_path / "model")
    label = pa.array([b"a", b"\xff", None, b"d"], pa.binary()).view(pa.string())
    table = pa.table({"text": ["1", "2", "3", "4"], "label": label})
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    job = make_job(tmp_path, prompt={"text": "text"}, columns=("label",), path=str(tmp_path / "rows.arrow"))
    index = run(job)
    assert [row["error_code"] for row in rows_of(index)] == [None, "bad_utf8", None, None]
    assert carried(index)["label"].to_pylist() == ["a", None, None, "d"]
