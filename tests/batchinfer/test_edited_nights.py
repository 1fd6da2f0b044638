"""Runs jobs repeatedly over randomly edited input: each result equals a fresh job's."""

from __future__ import annotations

import csv
import json
import random
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.pipeline.plans import waves
from batchinfer.store.index import ingest
from batchinfer.store.index.ingest import Ingestion, IngestProgress
from tests.batchinfer.pipeline.test_pipeline import FAKE, run
from tests.batchinfer.test_kept_nights import check, known
from tests.batchinfer.test_ladder_job import LADDER
from tests.batchinfer.test_tools_job import job, tool
from tests.examples import examples

__all__ = ["known"]  # a fixture

Row = dict[str, Any]
IN_WAVES = replace(FAKE, waves_from_s=0.0)
SECTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": {"max_tokens": 8, "temperature": 0.8}},
    "ladder": {"sampling": {"max_tokens": 8}, "on_invalid": LADDER},
}
NAMES = ("id", "text", "age", "can")


def jsonl(path: Path, rows: Sequence[Row]) -> None:
    lines = ("{broken" if row["text"] == "broken" else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))


def table(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, NAMES)
        writer.writeheader()
        writer.writerows(rows)


def parquet(path: Path, rows: Sequence[Row]) -> None:
    kinds = pa.schema([("id", pa.string()), ("text", pa.string()), ("age", pa.int64()), ("can", pa.string())])
    pq.write_table(pa.Table.from_pylist([*rows], kinds), path, row_group_size=7)


WRITERS: dict[str, Callable[[Path, Sequence[Row]], None]] = {"jsonl": jsonl, "csv": table, "parquet": parquet}


class Input:
    """The files of a job, randomly edited. Only edited files are written."""

    def __init__(self, folder: Path, form: str, seed: int) -> None:
        self._folder, self._form, self._dice, self._made = folder, form, random.Random(seed), 0
        self.files: dict[str, list[Row]] = {}
        folder.mkdir()
        for name in "bcd":
            self._write(name, [self._new() for _ in range(20)])

    def edit(self) -> None:
        """Edit some of the files, some of them several times."""
        for _ in range(self._dice.randrange(1, 7)):
            name = self._dice.choice([*self.files])
            rows = [*self.files[name]]
            self._dice.choice((self._change, self._change, self._rows, self._order, self._whole))(name, rows)

    def _change(self, name: str, rows: list[Row]) -> None:
        for at in self._dice.sample(range(len(rows)), min(len(rows), self._dice.randrange(1, 4))):
            column, new = self._dice.choice(NAMES), self._new()
            rows[at] = rows[at] | {column: new[column]}
        self._write(name, rows)

    def _rows(self, name: str, rows: list[Row]) -> None:
        """Insert, repeat and remove rows; some inserted rows have another row's request."""
        at = self._dice.randrange(len(rows) + 1)
        other = self._dice.choice(self._dice.choice([*self.files.values()]) or [self._new()])
        equal = self._new() | {"text": other["text"], "can": other["can"]}
        rows[at:at] = self._dice.choice(([self._new()], [other], [equal], [equal, other]))
        if self._dice.random() < 0.6:
            del rows[self._dice.randrange(len(rows))]
        self._write(name, rows)

    def _order(self, name: str, rows: list[Row]) -> None:
        self._dice.shuffle(rows)
        self._write(name, rows)

    def _whole(self, name: str, rows: list[Row]) -> None:
        """Add, remove or rename a file, or write it again unchanged."""
        what = self._dice.choice(("add", "remove", "rename", "again"))
        if what != "add" and what != "again" and len(self.files) > 1:
            del self.files[name]
            (self._folder / f"{name}.{self._form}").unlink()
        if what in ("rename", "again"):
            self._write(name if what == "again" else self._dice.choice("aez"), rows)
        elif what == "add":
            self._write(self._dice.choice("afz"), [self._new() for _ in range(5)])

    def _write(self, name: str, rows: list[Row]) -> None:
        self.files[name] = rows
        WRITERS[self._form](self._folder / f"{name}.{self._form}", rows)

    def _new(self) -> Row:
        """Return a row, which is sometimes wrong."""
        self._made += 1
        text = self._dice.choice([None, "broken", *[f"person {self._made}"] * 30])
        tools = json.dumps([tool(self._dice.choice(["add", "sub"]))]) if self._dice.random() < 0.6 else "[]"
        can = self._dice.choice(["[wrong", *[tools] * 20])
        return {"id": f"p{self._dice.randrange(200)}", "text": text, "age": self._made, "can": can}


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read few rows at a time: engines have loaded long before the end of the input."""
    steps = Ingestion.steps

    def slow(self: Ingestion) -> Generator[IngestProgress, None, None]:
        self._options = replace(self._options, chunk=replace(self._options.chunk, lines=6))
        for at in steps(self):
            yield at
            time.sleep(0.03)

    monkeypatch.setattr(ingest.Ingestion, "steps", slow)
    monkeypatch.setattr(waves, "MOST_AGAIN", 1.0)
    monkeypatch.setenv("FAKE_ENGINE_LEVELS", "4")


def written(folder: Path, model: Path, kind: str) -> Path:
    """Write a job over the files in `in`, with a column of tools."""
    return job(
        folder,
        model,
        None,
        prompt={"system": None, "chat_template": "chat.jinja", "tools_from_column": "can"},
        input={"path": "in", "id": "id", "unique_ids": True},
        output={"path": "out/res", "columns": ["age"], "rows_per_file": 25},
        on_error={"max_error_rate": 1.0},
        **SECTIONS[kind],
    )


@pytest.mark.usefixtures("slowly")
def test_a_night_of_many_edits_in_waves(tmp_path: Path, model: Path, known: list[int]) -> None:
    files = Input(tmp_path / "in", "jsonl", seed=4)
    path = written(tmp_path, model, "greedy")
    run(path)
    for _ in range(examples(2, 4)):
        files.edit()
    known.clear()
    assert run(path, IN_WAVES).row["waves"] > 1
    assert any(known)
    check(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.usefixtures("slowly")
def test_edited_nights(tmp_path: Path, model: Path, known: list[int], kind: str, form: str) -> None:
    """Rows are planned all at once, or run in waves."""
    files = Input(tmp_path / "in", form, seed=len(kind + form))
    path = written(tmp_path, model, kind)
    for night in range(6):
        run(path, FAKE if night % 3 == 1 else IN_WAVES)
        assert not (night == 0 and any(known))
        check(path)
        files.edit()
    assert any(known) == (kind != "sampled")
