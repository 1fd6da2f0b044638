"""Unchanged files and input chunks: ingest with the kept index gives the same index as a fresh run, without the
tokens of kept rows.
"""

from __future__ import annotations

import csv
import errno
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import JobFileError, StorageError
from batchinfer.filesystem.durable import FileOps
from batchinfer.input.chunk import ChunkSize
from batchinfer.input.prompts.prepared.rows import PreparedPrompts
from batchinfer.input.reader import Reader
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.store.index import keeping
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import ingest
from batchinfer.store.index.keeping import KeptIndex, KeptIndexReuse
from batchinfer.store.kept.chunks import KeptChunk
from batchinfer.store.kept.files import NAMES, remove_strays
from tests import warm_commands
from tests.batchinfer.filesystem.failing_ops import FailingOps
from tests.batchinfer.store.index.ingest_kit import checkpoint, make_job, options, rows_of
from tests.batchinfer.test_tools_job import tool
from tests.patience import PATIENCE_S

Row = dict[str, Any]
Write = Callable[[Path, Sequence[Row]], Path]
REPOSITORY = Path(__file__).parents[4]
FEW = ChunkSize(bytes=512, lines=4)
SINGLE = {"chunk": ChunkSize(lines=1)}


def jsonl(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def table(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "in.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "more"])
        writer.writeheader()
        writer.writerows(rows)
    return path


def parquet(folder: Path, rows: Sequence[Row]) -> Path:
    path = folder / "in.parquet"
    kinds = pa.schema([("id", pa.string()), ("text", pa.string()), ("more", pa.int64())])
    pq.write_table(pa.Table.from_pylist(list(rows), kinds), path, row_group_size=6)
    return path


FORMATS: dict[str, Write] = {"jsonl": jsonl, "csv": table, "parquet": parquet}


def people(count: int, first: int = 0) -> list[Row]:
    return [
        {"id": f"p{n}", "text": f"person {n}" + ' said\n"no"' * (n % 5 == 3), "more": n}
        for n in range(first, first + count)
    ]


class Nights:
    """A job over one file that is ingested repeatedly. `lacks`: keys missing in the store."""

    def __init__(self, folder: Path, **job: Any) -> None:
        self.folder = folder
        if not (folder / "model").exists():
            checkpoint(folder / "model")
        self.sections = {"prompt": {"user": "{{ text }}"}, "columns": ("more",), "id": "id"} | job
        self.lacks: set[bytes] = set()
        self.told: list[str] = []

    def answered(self, prompts: PreparedPrompts) -> bool:
        return not any(prompts.keys[at : at + 32] in self.lacks for at in range(0, len(prompts.keys), 32))

    def job(self, path: Path) -> Job:
        place = {} if "sql" in self.sections else {"path": str(path)}
        return make_job(self.folder, **place, **self.sections)

    def ingest(
        self, path: Path, kept: bool = True, ops: FileOps | None = None, fresh: bool = False, **more: Any
    ) -> Index:
        scratch = self.folder / ("scratch" if kept else "fresh")
        if scratch.exists():
            shutil.rmtree(scratch)
        known = KeptIndexReuse(self.folder / "kept", self.answered, self.told.append, fresh) if kept else None
        job = self.job(path)
        tokenizer = Tokenizer.load(job.model.path)
        return ingest(job, tokenizer, options(**{"chunk": FEW} | more), scratch, ops=ops, keeping=known)

    def check(self, path: Path, ops: FileOps | None = None, **more: Any) -> int:
        """Ingest with the kept index and without, and compare. Return the number of rows without tokens."""
        found, fresh = self.ingest(path, ops=ops, **more), self.ingest(path, kept=False, **more)
        return compared(found, fresh)


def compared(found: Index, fresh: Index) -> int:
    """Compare two indexes of the same rows. Return the number of rows of the first without tokens."""
    known = 0
    for one, other in zip(rows_of(found), rows_of(fresh), strict=True):
        place, offset = one.pop("token_offset"), other.pop("token_offset")
        assert one == other
        assert (offset is None) == (one["key"] is None)
        if place is None:
            known += offset is not None
        else:
            size = one["token_count"]
            assert found.tokens.read(place, size).tolist() == fresh.tokens.read(offset, size).tolist()
    parts = [[pq.read_table(part) for part in index.passthrough_parts] for index in (found, fresh)]
    assert parts[0] == parts[1]
    assert replace(found, folder=fresh.folder, known_rows=0) == fresh
    assert found.known_rows >= known, "some may have become error rows"
    return known


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source of each chunk of an ingest: kept, or from a worker."""
    came: list[str] = []
    give = KeptIndex._give

    def noted(self: KeptIndex, digest: str, known: KeptChunk | None) -> None:
        came.append("read" if known is None else "kept")
        give(self, digest, known)

    monkeypatch.setattr(KeptIndex, "_give", noted)
    return came


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read. Files count as unchanged immediately after they were written."""
    names: list[str] = []
    chunks = Reader.chunks

    def noted(self: Reader, columns: Sequence[str] | None = None) -> Any:
        names.extend(file.name for file in self.files)
        return chunks(self, columns)

    monkeypatch.setattr(Reader, "chunks", noted)
    monkeypatch.setattr(keeping, "SETTLED_S", -1.0)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_chunks_before_rows_that_were_appended_are_reused(tmp_path: Path, name: str) -> None:
    columns = ("more",) if name != "csv" else ("more", "text")
    nights, write, rows = Nights(tmp_path, columns=columns, unique_ids=True), FORMATS[name], people(40)
    rows[8] |= {"id": None}
    rows[9] |= {"id": 'Zoë " 漢字'}
    rows[10] |= {"id": ""}
    assert nights.check(write(tmp_path, rows)) == 0
    rows += people(3, 100)
    known = nights.check(write(tmp_path, rows))
    assert known == 0 if name == "parquet" else 30 < known <= 40
    assert nights.check(write(tmp_path, rows)) == 43
    rows[35] |= {"text": "changed"}
    rows[20:20] = people(2, 200)
    known = nights.check(write(tmp_path, rows))
    assert known == 0 if name == "parquet" else 10 < known <= 20
    assert nights.told == []


def test_files_and_chunks_that_did_not_change_are_not_read(
    tmp_path: Path, read: list[str], opened: list[str]
) -> None:
    nights = Nights(tmp_path, columns=("more",))
    lines = [json.dumps(row) for row in people(40)]
    lines[9] = "{not json"

    def write(name: str, some: Sequence[str]) -> None:
        (tmp_path / name).write_text("".join(f"{line}\n" for line in some))

    write("a.jsonl", lines[:20])
    write("b.jsonl", lines[20:])
    everything = tmp_path / "*.jsonl"
    assert nights.check(everything) == 0
    assert set(read) == {"read"}
    chunks = len(read)
    write("b.jsonl", [*lines[20:], lines[3]])
    write("c.jsonl", [json.dumps(row) for row in people(3, 90)])
    read.clear()
    opened.clear()
    nights.ingest(everything)
    assert opened == ["b.jsonl", "c.jsonl"]
    assert (read.count("kept"), read.count("read")) == (chunks - 1, 2)
    opened.clear()
    assert nights.ingest(everything, fresh=True).known_rows == 43
    assert opened == ["a.jsonl", "b.jsonl", "c.jsonl"]
    (tmp_path / "a.jsonl").unlink()
    read.clear()
    assert nights.check(everything) == 24, "the rows of a file that is gone are not there"
    assert set(read) == {"kept"}


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    """It may be written again within the resolution of its times."""
    nights, path = Nights(tmp_path), jsonl(tmp_path, people(8))
    nights.ingest(path)
    assert json.loads((tmp_path / "kept/kept.json").read_text())["stretches"][0]["files"] == []


@pytest.mark.slow
def test_rows_without_an_answer_are_prepared_again(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    rows = people(20)
    keys = [row["key"] for row in rows_of(nights.ingest(jsonl(tmp_path, rows)))]
    nights.lacks = {*keys[3:6]}
    assert nights.check(jsonl(tmp_path, rows)) < 17, "chunks are prepared as a whole"
    nights.lacks = set()
    assert nights.check(jsonl(tmp_path, rows)) == 20


DAY = "{{ strftime_now('%d %b') }} "
# Changes of the job and of ingest's options, the chat template, and how many of 8 rows stay known
CHANGES: list[tuple[dict[str, Any], dict[str, Any], str, int]] = [
    ({"prompt": {"user": "say {{ text }}"}}, {}, "", 0),
    ({"prompt": {"user": "{{ text }}", "tools": [tool()]}}, {}, "{{ tools or [] }}", 0),
    ({"sampling": {"max_tokens": 9}}, {}, "", 0),
    ({"id": None}, {}, "", 0),
    ({"columns": ()}, {}, "", 0),
    ({"on_invalid": ({"max_tokens": 20},)}, {}, "", 0),
    ({}, {"context": b"d" * 32}, "", 0),
    ({}, {"vocab_size": 999}, "", 0),
    ({}, {"now": datetime(2026, 1, 2, 23)}, DAY, 8),
    ({}, {"now": datetime(2026, 1, 3)}, DAY, 0),
    ({}, {"now": datetime(2026, 1, 3)}, "", 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sections", "more", "template", "known"), CHANGES)
def test_rows_of_another_job_are_not_known(
    tmp_path: Path, sections: dict[str, Any], more: dict[str, Any], template: str, known: int
) -> None:
    checkpoint(tmp_path / "model", template + "{{ messages[-1].content }}")
    nights, path = Nights(tmp_path), jsonl(tmp_path, people(8))
    nights.ingest(path)
    nights.sections |= sections
    assert nights.check(path, **more) == known
    assert nights.check(path, **more) == 8
    checkpoint(tmp_path / "model", f"say {template}{{{{ messages[-1].content }}}}")
    assert nights.check(path, **more) == 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.7}, {"temperature": 0.8, "n": 3, "from_columns": {"n": "several"}}]
)
def test_sampled_rows_are_prepared_again(tmp_path: Path, sampling: dict[str, Any]) -> None:
    """Answers of duplicates are assigned by their tokens."""
    nights = Nights(tmp_path, sampling=sampling, id=None, columns=())
    rows = [{"text": f"person {n % 17}", "n": n} for n in range(20)]
    rows[5] |= {"several": 2}
    nights.ingest(jsonl(tmp_path, rows))
    assert nights.check(jsonl(tmp_path, rows)) == 0
    rows.insert(0, {"text": "person 9", "n": 99})
    assert nights.check(jsonl(tmp_path, rows)) == 0
    assert nights.told == []


@pytest.mark.parametrize("source", [{"limit": 10}, {"sql": "SELECT * FROM 'in.jsonl'"}], ids=str)
def test_nothing_is_kept_of_a_query_and_of_rows_up_to_a_limit(tmp_path: Path, source: dict[str, Any]) -> None:
    nights, path = Nights(tmp_path, **source), jsonl(tmp_path, people(30))
    assert nights.ingest(path).known_rows == nights.ingest(path).known_rows == 0
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_rows_with_parameters_of_their_own_and_a_ladder(tmp_path: Path) -> None:
    nights = Nights(
        tmp_path,
        sampling={"max_tokens": 9, "from_columns": ["temperature", "choice"]},
        on_invalid=({"temperature": 0.5}, {"max_tokens": 30}),
    )
    rows = people(30)
    for n, row in enumerate(rows):
        row |= {"temperature": 0.5} if n in (0, 4, 8) else {}
        row |= {"choice": [f"yes {n}", "no"]} if n % 3 == 0 else {}
    nights.ingest(jsonl(tmp_path, rows), **SINGLE)
    rows[5] |= {"temperature": 0.9}
    rows[6] |= {"temperature": -1}
    assert nights.check(jsonl(tmp_path, rows), **SINGLE) == 25


@pytest.mark.slow
def test_openai_requests_are_known(tmp_path: Path) -> None:
    def request(n: int) -> Row:
        body = {
            "messages": [{"role": "user", "content": f"hello {n}"}],
            "max_tokens": 5 + n % 3,
            "temperature": 0,
        }
        return {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}

    nights = Nights(tmp_path, prompt=None, id=None, columns=())
    rows = [request(n) for n in range(12)]
    nights.ingest(jsonl(tmp_path, rows), **SINGLE)
    rows[3]["custom_id"] = "x"
    rows[4]["body"]["max_tokens"] = 100
    assert nights.check(jsonl(tmp_path, rows), **SINGLE) == 10


@pytest.mark.parametrize("sections", [{"columns": ("rare",)}, {"columns": (), "id": "rare"}])
def test_a_column_that_disappeared_from_all_rows_is_reported(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    nights, rows = Nights(tmp_path, **sections), people(9)
    rows[1]["rare"] = 1
    nights.ingest(jsonl(tmp_path, rows))
    rows[8]["more"] = 77
    assert nights.check(jsonl(tmp_path, rows)) >= 4, "columns of chunks that are not read are known"
    del rows[1]
    with pytest.raises(JobFileError, match="no column 'rare'; it has: id, text, more"):
        nights.ingest(jsonl(tmp_path, rows))


@pytest.mark.slow
def test_changed_carried_columns_appear(tmp_path: Path) -> None:
    """Their types follow from all current rows."""
    nights = Nights(tmp_path)
    rows = people(12)
    nights.ingest(jsonl(tmp_path, rows))
    for more in ("a text", 0.5):
        rows[11]["more"] = more
        assert nights.check(jsonl(tmp_path, rows)) >= 4


# --- damage, kills and failing disks


DAMAGES = [(name, how) for name in (*NAMES, "kept.json") for how in ("flipped", "cut", "gone")]


@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(*one, marks=pytest.mark.slow if number else ()) for number, one in enumerate(DAMAGES)],
)
def test_damage_is_reported_and_all_rows_are_read_again(tmp_path: Path, name: str, how: str) -> None:
    nights, path = Nights(tmp_path), jsonl(tmp_path, people(8))
    nights.ingest(path)
    (file,) = (tmp_path / "kept").rglob(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1 if name != "kept.json" else 128
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    assert nights.check(path) == 0
    assert len(nights.told) == (0 if (name, how) == ("kept.json", "gone") else 1)
    remove_strays(tmp_path / "kept", FileOps())
    assert len(list((tmp_path / "kept").iterdir())) == 2
    assert nights.check(path) == 8


@pytest.mark.slow
def test_a_failure_at_any_operation_changes_no_row(tmp_path: Path) -> None:
    nights, rows, counting = Nights(tmp_path), people(12), FailingOps()
    nights.ingest(jsonl(tmp_path, rows))
    nights.ingest(jsonl(tmp_path, rows), ops=counting)
    for number in range(counting.count):
        rows[number % 12]["text"] = f"changed at {number}"
        path = jsonl(tmp_path, rows)
        with suppress(StorageError):
            nights.ingest(path, ops=FailingOps(number, errno.ENOSPC))
        nights.check(path)
    assert nights.told == []


@pytest.mark.parametrize("step", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_operation_changes_no_row(tmp_path: Path, step: int) -> None:
    """Runs in separate processes: this one has threads and must not fork."""
    nights, rows, counting = Nights(tmp_path), people(12), FailingOps()
    nights.ingest(jsonl(tmp_path, rows))
    nights.ingest(jsonl(tmp_path, rows), ops=counting)
    for number in range(step // 2, counting.count, step):
        rows[number % 12]["text"] = f"changed at {number}"
        path = jsonl(tmp_path, rows)
        command = [sys.executable, "-m", "tests.batchinfer.store.index.test_keeping", str(path), str(number)]
        done = warm_commands.run(command, cwd=REPOSITORY, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == -signal.SIGKILL, done.stderr
        nights.check(path)
        remove_strays(tmp_path / "kept", FileOps())
        assert len(list((tmp_path / "kept").iterdir())) == 2
    assert nights.told == []


# --- edits of a small table

EDITS = st.lists(
    st.tuples(st.sampled_from(["change", "insert", "remove", "repeat", "break", "swap"]), st.integers(0, 30)),
    max_size=4,
)


def edited(rows: list[Any], edits: Sequence[tuple[str, int]]) -> list[Any]:
    rows = [*rows]
    for number, (what, where) in enumerate(edits):
        at = where % (len(rows) + (what == "insert")) if rows or what == "insert" else None
        if at is None:
            continue
        if what == "insert":
            rows.insert(at, {"id": f"new {where}", "text": f"inserted {where}", "more": None})
        elif what == "remove":
            del rows[at]
        elif what == "repeat":
            rows.append(rows[at])
        elif what == "break":
            rows[at] = "{broken"
        elif what == "swap":
            rows[at], rows[0] = rows[0], rows[at]
        elif isinstance(rows[at], dict):
            rows[at] = rows[at] | {"text": f"changed {where} {number}"}
    return rows


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(nights=st.lists(EDITS, min_size=1, max_size=3), samples=st.integers(0, 3), lost=st.integers(0, 15))
def test_any_edits_of_a_table(
    tmp_path_factory: pytest.TempPathFactory, nights: list[list[tuple[str, int]]], samples: int, lost: int
) -> None:
    """`samples`: number per row; 0 means a greedy answer."""
    folder = tmp_path_factory.mktemp("edits")
    sampling = {"temperature": 0.5 if samples else 0.0, "n": max(1, samples)}
    job = Nights(folder, unique_ids=True, sampling=sampling)
    rows: list[Any] = people(15)
    job.check(jsonl(folder, rows))
    job.lacks = {row["key"] for row in rows_of(job.ingest(jsonl(folder, rows)))[lost:][:1] if row["key"]}
    for edits in nights:
        rows = edited(rows, edits)
        job.check(jsonl(folder, rows))
    assert job.told == []


def main(path: Path, number: int) -> None:
    """Ingest the file, and die at operation `number`."""
    Nights(path.parent).ingest(path, ops=FailingOps(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
