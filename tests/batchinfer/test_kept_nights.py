"""Runs jobs repeatedly and checks that results equal a job without state, byte by byte."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import StorageError, TooFewRows
from batchinfer.filesystem.location import Location
from batchinfer.input.chunk import ChunkSize
from batchinfer.input.input_file import InputFile
from batchinfer.input.reader import Reader
from batchinfer.job import load_job
from batchinfer.pipeline.clean import clean_job
from batchinfer.store.index.ingest import Ingestion
from batchinfer.store.index.keeping import KeptIndex
from batchinfer.store.kept.files import KEPT_FORMAT
from batchinfer.store.results.reuse.answered import AnsweredRows
from batchinfer.store.results.verify import verify_result
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, run, write_job
from tests.batchinfer.test_nightly import aged

FIELDS: dict[str, Any] = {
    "input": {"path": "in.jsonl", "id": "id", "unique_ids": True},
    "output": {"path": "out/res", "columns": ["age"], "rows_per_file": 10},
    "on_error": {"max_error_rate": 1.0},
}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of known rows of each chunk."""
    found: list[int] = []
    append = KeptIndex.append

    def noted(self: KeptIndex, rows: Any) -> None:
        found.append(int((rows.prompts.counts > 0).sum()) if rows.prompts.reused else 0)
        append(self, rows)

    monkeypatch.setattr(KeptIndex, "append", noted)
    return found


@pytest.fixture(autouse=True)
def line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each line a chunk."""
    opened = Ingestion._opened

    def small(self: Ingestion, files: Sequence[InputFile]) -> Reader:
        self._options = replace(self._options, chunk=ChunkSize(lines=1))
        return opened(self, files)

    monkeypatch.setattr(Ingestion, "_opened", small)


def published(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "out/res").iterdir())}


def check(path: Path) -> None:
    """Compare the published result with a run without state."""
    found = published(path.parent)
    assert verify_result(Location.at(path.parent / "out/res")) == []
    shutil.move(path.parent / "out", path.parent / "aside")
    run(path)
    fresh = published(path.parent)
    shutil.rmtree(path.parent / "out")
    shutil.move(path.parent / "aside", path.parent / "out")
    assert found == fresh


def test_a_night_without_rows_leaves_the_state_usable(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(20), **FIELDS)
    run(path)
    full, rows = published(tmp_path), (tmp_path / "in.jsonl").read_bytes()
    (tmp_path / "in.jsonl").write_bytes(b"")
    with pytest.raises(TooFewRows):
        run(path)
    assert published(tmp_path) == full
    assert run(path, FAKE, ("input.allow_empty", "true")).row["rows"] == 0
    with pytest.raises(TooFewRows):
        run(path)  # also where the empty result is published
    (tmp_path / "in.jsonl").write_bytes(rows)
    assert run(path, NO_ENGINE).row["reused_requests"] == 20
    assert published(tmp_path) == full


def test_state_of_an_older_version_is_dropped(tmp_path: Path, model: Path, known: list[int]) -> None:
    """The input is read again, and no answer is lost."""
    path = write_job(tmp_path, model, people(20), **FIELDS)
    run(path)
    kept = tmp_path / "out/.batchinfer-res/kept"
    marker = json.loads((kept / "kept.json").read_text())
    folder = marker["stretches"][0]["folder"]
    marker |= {"format": KEPT_FORMAT - 1, "shape": [1, 1], "tokenizer": ""}
    (kept / "kept.json").write_text(json.dumps(marker))
    (kept / folder / "rows.bin").write_bytes(b"records")
    known.clear()
    path = write_job(tmp_path, model, people(21), **FIELDS)
    assert run(path).row["computed_requests"] == 1
    assert sum(known) == 0
    assert not (kept / folder).exists()
    assert json.loads((kept / "kept.json").read_text())["format"] == KEPT_FORMAT
    check(path)


@pytest.mark.slow
def test_answers_that_are_lost_after_the_rows_were_read(
    tmp_path: Path, model: Path, known: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of rows without tokens is wrong for one run. The next run is right."""
    path = write_job(tmp_path, model, people(30), **FIELDS)
    run(path)
    for file in (tmp_path / "out/.batchinfer-res/completions").glob("part-*"):
        file.unlink()
    (tmp_path / "out/res/_manifest.json").unlink()
    known.clear()
    with monkeypatch.context() as wrong:
        wrong.setattr(AnsweredRows, "__call__", lambda *_: True)
        with pytest.raises(StorageError, match="answers of 30 requests are gone, or no longer valid, since"):
            run(path)
    assert sum(known) == 30
    assert run(path).row["computed_requests"] == 30
    assert sum(known) == 30
    check(path)


@pytest.mark.slow
def test_a_trial_neither_uses_nor_replaces_kept_state(tmp_path: Path, model: Path, known: list[int]) -> None:
    path = write_job(tmp_path, model, people(30), **FIELDS)
    run(path)
    marker = tmp_path / "out/.batchinfer-res/kept/kept.json"
    before = marker.read_bytes()
    known.clear()
    run(path, replace(FAKE, limit=5))
    assert (marker.read_bytes(), known) == (before, [])


def test_kept_state_is_removed_at_the_age_of_unused_answers(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(5), cache={"keep": 20}, **FIELDS)
    run(path)
    kept = tmp_path / "out/.batchinfer-res/kept"
    aged(tmp_path / "out/.batchinfer-res", 19)
    clean_job(load_job(path), dry_run=False)
    assert kept.is_dir()
    aged(tmp_path / "out/.batchinfer-res", 2)
    assert clean_job(load_job(path), dry_run=True).folders == 1
    assert kept.is_dir()
    clean_job(load_job(path), dry_run=False)
    assert not kept.exists()


@pytest.mark.slow
def test_after_two_hundred_nights_the_state_is_as_large_as_after_a_few(
    tmp_path: Path, model: Path, known: list[int]
) -> None:
    dice, rows = random.Random(4), people(100)
    fields = FIELDS | {"output": {"path": "out/res"}, "cache": {"keep": 1}}
    state, sizes = tmp_path / "out/.batchinfer-res", []
    for night in range(200):
        rows[dice.randrange(100)] = {"id": f"n{night}", "text": f"changed {night}", "age": night}
        path = write_job(tmp_path, model, rows, **fields)
        known.clear()
        run(path)
        assert sum(known) == (99 if night else 0)
        aged(tmp_path / "out/.batchinfer-res/completions", 0.5)
        sizes.append(sum(file.stat().st_size for file in state.rglob("*") if file.is_file()))
        aged(state / "generations", 1)
    check(path)
    assert max(sizes[-20:]) < 1.5 * max(sizes[10:30])
    assert len(list((state / "kept").iterdir())) == 3, "one stretch, and two markers"
