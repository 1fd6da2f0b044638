"""Nights on which leading files did not change: their rows are taken over whole, and what is published is what a job
without any state publishes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchinfer.data.index import keeping
from batchinfer.data.index.keeping import KeptIndex
from batchinfer.data.kept import stretches
from batchinfer.data.results.verify import verify_result
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, run, write_job

Row = dict[str, Any]
FIELDS: dict[str, Any] = {
    "input": {"path": "in/*.jsonl", "id": "id", "unique_ids": True},
    "output": {"path": "out/res", "columns": ["age"], "rows_per_file": 7},
    "on_error": {"max_error_rate": 1.0},
    "commit": {"rows": 8, "seconds": 60.0},
}
# Of the report: they are the same whatever was stored or taken over
FIGURES = ("rows", "rows_ok", "rows_error", "distinct_requests", "duplicate_rows")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is a stretch, and need not lie for a while to show that it was changed."""
    monkeypatch.setattr(keeping, "SETTLED_S", -1.0)
    monkeypatch.setattr(stretches, "_BYTES", 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each run took over whole."""
    found: list[int] = []
    finish = KeptIndex.finish

    def noted(self: KeptIndex, *args: Any) -> Any:
        found.append(self.taken.rows)
        return finish(self, *args)

    monkeypatch.setattr(KeptIndex, "finish", noted)
    return found


class Nights:
    """A job over the files of a folder, run again and again."""

    def __init__(self, folder: Path, model: Path, **sections: Any) -> None:
        self.folder = folder
        (folder / "in").mkdir()
        self.job = write_job(folder, model, **(FIELDS | sections))
        self.state = folder / "out/.batchinfer-res"

    def write(self, name: str, rows: Sequence[Any]) -> None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (self.folder / f"in/{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(self, options: Any = FAKE) -> Any:
        return run(self.job, options)

    def check(self) -> None:
        """Run, and hold what was published against a run without state."""
        report = self.run().row
        found = self.published()
        assert verify_result(self.folder / "out/res") == []
        shutil.move(self.folder / "out", self.folder / "aside")
        alone = self.run().row
        fresh = self.published()
        shutil.rmtree(self.folder / "out")
        shutil.move(self.folder / "aside", self.folder / "out")
        assert found == fresh
        assert [report[name] for name in FIGURES] == [alone[name] for name in FIGURES]

    def published(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "out/res").iterdir())}


def test_files_before_one_that_is_new_or_changed_are_taken_over(
    tmp_path: Path, model: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "9")
    nights, rows = Nights(tmp_path, model), people(60)
    rows[4] = rows[3] | {"text": "somebody else"}  # its id is repeated
    nights.write("a", [*rows[:10], "{not json"])
    nights.write("b", [*rows[10:20], rows[11] | {"id": "again"}])
    nights.run()
    nights.write("c", [*rows[20:30], rows[2], rows[7] | {"id": "once more"}])
    nights.check()
    assert taken == [0, 22, 0]
    nights.write("b", rows[10:21])
    nights.check()
    assert taken[3:] == [11, 0]
    nights.write("c", [row | {"age": "old"} for row in rows[20:30]])
    nights.check()
    assert taken[-2:] == [0, 0], "the column has texts now, in all rows"
