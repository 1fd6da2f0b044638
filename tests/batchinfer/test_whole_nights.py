"""Tests runs with unchanged leading files: their rows are reused, and results equal a job without state."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import StorageError
from batchinfer.filesystem import state
from batchinfer.filesystem.location import Location
from batchinfer.pipeline import run as run_stages
from batchinfer.store.index import keeping
from batchinfer.store.index.keeping import KeptIndex
from batchinfer.store.kept import segments
from batchinfer.store.results import join
from batchinfer.store.results.verify import verify_result
from tests import warm_commands
from tests.batchinfer.filesystem.failing_ops import FailingOps
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, run, write_job
from tests.patience import PATIENCE_S

FIELDS: dict[str, Any] = {
    "input": {"path": "in/*.jsonl", "id": "id", "unique_ids": True},
    "output": {"path": "out/res", "columns": ["age"], "rows_per_file": 7},
    "on_error": {"max_error_rate": 1.0},
    "commit": {"rows": 8, "seconds": 60.0},
}
# Columns of the report that do not depend on the store or on reused rows
COMPARED = ("rows", "rows_ok", "rows_error", "distinct_requests", "duplicate_rows")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each file a unit of reuse, and trust file times at once."""
    monkeypatch.setattr(keeping, "SETTLED_S", -1.0)
    monkeypatch.setattr(segments, "_BYTES", 1)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of reused rows of each run."""
    found: list[int] = []
    finish = KeptIndex.finish

    def noted(self: KeptIndex, *args: Any) -> Any:
        found.append(self.reused.rows)
        return finish(self, *args)

    monkeypatch.setattr(KeptIndex, "finish", noted)
    return found


REPOSITORY = Path(__file__).parents[2]


class Nights:
    """A job over the files of a folder, run repeatedly."""

    def __init__(self, folder: Path, model: Path, **sections: Any) -> None:
        self.folder = folder
        (folder / "in").mkdir(parents=True)
        self.job = write_job(folder, model, **(FIELDS | sections))
        self.state = folder / "out/.batchinfer-res"

    def write(self, name: str, rows: Sequence[Any]) -> None:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (self.folder / f"in/{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(self, options: Any = FAKE) -> Any:
        return run(self.job, options)

    def check(self) -> None:
        """Run the job and compare its result with a run without state."""
        report = self.run().row
        found = self.published()
        assert verify_result(Location.at(self.folder / "out/res")) == []
        shutil.move(self.folder / "out", self.folder / "aside")
        alone = self.run().row
        fresh = self.published()
        shutil.rmtree(self.folder / "out")
        shutil.move(self.folder / "aside", self.folder / "out")
        assert found == fresh
        if report["distinct_requests"] is not None:  # else all was published already
            assert [report[name] for name in COMPARED] == [alone[name] for name in COMPARED]

    def published(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "out/res").iterdir())}


def test_files_before_a_new_or_changed_one_are_reused(
    tmp_path: Path, model: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is interrupted before it publishes."""
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "9")
    nights, rows = Nights(tmp_path, model), people(60)
    rows[4] = rows[3] | {"text": "somebody else"}  # its id is repeated
    nights.write("a", [*rows[:10], "{not json"])
    nights.write("b", [*rows[10:20], rows[11] | {"id": "again"}])
    with monkeypatch.context() as broken:
        broken.setattr(run_stages, "refuse_to_publish", Mock(side_effect=StorageError("no space")))
        with pytest.raises(StorageError, match="no space"):
            nights.run()
    nights.run()
    nights.write("c", [*rows[20:30], rows[2], rows[7] | {"id": "again"}])
    nights.run()
    assert taken == [0, 22], "the second run read nothing"
    nights.write("b", rows[10:21])
    nights.check()
    assert taken[2:] == [11, 0]
    nights.write("c", [row | {"age": "old"} for row in rows[20:30]])
    nights.check()
    assert taken[-2:] == [0, 0], "the column has texts now, in all rows"


def test_a_sampled_duplicate_of_a_reused_row_is_another_sample(
    tmp_path: Path, model: Path, taken: list[int]
) -> None:
    nights, rows = Nights(tmp_path, model, sampling={"temperature": 1.0, "max_tokens": 8}), people(14)
    nights.write("a", rows[:10])
    nights.run()
    nights.write("b", [*rows[10:12], rows[3] | {"id": "again"}])
    nights.run()
    assert taken == [0, 10]
    nights.write("c", [rows[13], rows[3] | {"id": "again"}, rows[11] | {"id": "twice"}])
    nights.check()


@pytest.mark.slow
def test_nights_of_a_job_with_several_answers_a_row(tmp_path: Path, model: Path) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 8, "n": 3}
    nights, rows = Nights(tmp_path, model, sampling=sampling), people(14)
    nights.write("a", rows[:10])
    nights.run()
    nights.write("a", [*rows[:4], rows[4] | {"text": "somebody else"}, *rows[5:11]])
    nights.run()
    nights.write("b", [rows[12], rows[3] | {"id": "again"}])
    nights.check()


def test_a_range_of_rows_is_read_again_if_a_part_is_missing(
    tmp_path: Path, model: Path, taken: list[int]
) -> None:
    """For example cleaned answers, or a damaged file. The rows before it are still reused."""
    nights = Nights(tmp_path, model)
    nights.write("a", people(20))
    nights.write("b", people(40)[20:])
    nights.run()
    nights.write("c", people(60)[40:])
    nights.run()
    nights.write("d", people(70)[60:])
    sorted((nights.state / "completions").glob("part-*.parquet"))[-1].unlink()
    nights.run()
    kept = json.loads((nights.state / "kept/whole.json").read_text())
    folder = kept["stretches"][1]["folder"]
    (part,) = (nights.state / "kept" / folder).glob("index-*")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    nights.write("e", people(80)[70:])
    nights.check()
    assert taken == [0, 40, 40, 20, 0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True])
def test_an_error_that_another_job_has_answered_since_is_published(
    tmp_path: Path, model: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """Both jobs use one store. Error rows are reused, or known if their file changed."""
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "5")
    cache = {"path": str(tmp_path / "store")}
    one, other = (Nights(tmp_path / name, model, cache=cache) for name in ("one", "other"))
    for nights in (one, other):
        nights.write("a", people(20))
        assert nights.run().row["rows_error"]
    monkeypatch.delenv("FAKE_ENGINE_FAILS_EVERY")
    assert other.run(replace(FAKE, retry_errors=True)).row["rows_error"] == 0
    one.write("b", people(25)[20:])
    if changes:
        one.write("a", [{"id": "first", "text": "another one"}, *people(20)[1:]])
    one.check()
    assert taken == [0, 0, 0, 0 if changes else 20, 0]


@pytest.mark.slow
def test_new_rows_are_searched_for_in_new_parts_only(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the plan found some of them in the store."""
    firsts, loaded = list[int](), join.load_chosen

    def noted(database: Any, parts: Any, attempts: int, keys: str | None, first: int) -> None:
        firsts.append(first)
        loaded(database, parts, attempts, keys, first)

    monkeypatch.setattr(join, "load_chosen", noted)
    nights, rows = Nights(tmp_path, model), people(30)
    nights.write("a", rows[:20])
    nights.run()
    before = len(list((nights.state / "completions").glob("part-*.parquet")))
    nights.write("b", rows[20:25])
    nights.run()
    nights.write("c", [rows[26], rows[3] | {"id": "again"}])
    nights.run()
    nights.write("d", [rows[27], rows[28]])
    nights.check()
    assert firsts == [0, before, 0, before + 2, 0]


@pytest.mark.slow
def test_repeated_ids_of_rows_whose_file_has_changed_are_errors(tmp_path: Path, model: Path) -> None:
    nights, rows = Nights(tmp_path, model), people(30)
    nights.write("a", rows[:20])
    nights.run()
    nights.write("a", [rows[3] | {"id": rows[7]["id"]}, *rows[:20]])
    assert nights.run().row["rows_error"] == 1
    nights.write("a", rows[:20])
    nights.check()
    assert nights.run().row["rows_error"] == 0


def test_stretches_stay_few_however_many_nights_add_a_file(
    tmp_path: Path, model: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_MOST", most := 2)
    monkeypatch.setattr(segments, "_BYTES", 1 << 20)
    nights = Nights(tmp_path, model)
    for night in range(3):
        nights.write(f"{night}", people(24)[4 * night : 4 * night + 4])
        nights.run()
        assert len(list((nights.state / "kept").iterdir())) <= 2 + most + 1
    nights.write("3", people(24)[12:])
    nights.run()
    assert taken == [0, 4, 0, 12], "of every other night they are put together"


@pytest.mark.parametrize("step", [None, pytest.param(11, marks=pytest.mark.slow)])
def test_a_kill_at_any_operation_of_a_run_changes_no_byte(
    tmp_path: Path, model: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    """The run reuses rows, publishes, and records rows for reuse. By default it is killed while it publishes."""
    nights = Nights(tmp_path, model)
    nights.write("a", people(20))
    nights.write("b", people(30)[20:])
    nights.run()
    counting = FailingOps()
    with monkeypatch.context() as patched:
        patched.setattr(state, "FileOps", lambda: counting)
        nights.write("c", people(40)[30:])
        nights.run()
    kinds = [entry.split()[0] for entry in counting.log]
    assert {"link", "exchange"} <= {*kinds}
    for number in [kinds.index("exchange")] if step is None else range(counting.count - 1, 0, -step):
        nights.write("c", [row | {"text": f"changed at {number}"} for row in people(40)[30:]])
        if step and number % 2:  # no file is reused as a whole
            nights.write("a", [{"id": "first", "text": f"changed at {number}"}, *people(20)[1:]])
        command = [sys.executable, "-m", "tests.batchinfer.test_whole_nights", str(nights.job), str(number)]
        done = warm_commands.run(command, cwd=REPOSITORY, capture_output=True, timeout=PATIENCE_S)
        assert done.returncode == -signal.SIGKILL, (counting.log[number], done.stderr)
        nights.check()
    assert {20, 30, 40}.intersection(taken[2:]), "some rows are still reused"


EDITS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "change", "again", "repeat", "lose"]), st.integers(0, 30)),
    max_size=3,
)


def edited(nights: Nights, files: dict[str, list[Any]], edits: Sequence[tuple[str, int]]) -> None:
    """Change the input files, or remove answers."""
    for what, where in edits:
        name = sorted(files)[where % len(files)]
        if what == "add":
            files[f"{where:02d}"] = [row | {"id": f"new {where} {n}"} for n, row in enumerate(people(4))]
            name = f"{where:02d}"
        elif what == "remove" and len(files) > 1:
            del files[name]
            (nights.folder / f"in/{name}.jsonl").unlink()
            continue
        elif what == "change":
            files[name] = [*files[name]]
            files[name][where % len(files[name])] = {
                "id": f"c{where}",
                "text": f"changed {where}",
                "age": 0.5,
            }
        elif what == "repeat":
            files[name] = [*files[name], files[sorted(files)[0]][0]]
        elif what == "lose":
            parts = sorted((nights.state / "completions").glob("part-*.parquet"))
            for part in parts[where % max(1, len(parts)) :][:1]:
                part.unlink()
        nights.write(name, files[name])


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(each=st.lists(EDITS, min_size=1, max_size=3), sampled=st.booleans())
def test_any_nights(
    tmp_path_factory: pytest.TempPathFactory, model: Path, each: list[list[tuple[str, int]]], sampled: bool
) -> None:
    sampling = {"max_tokens": 8, "temperature": 0.8 if sampled else 0.0}
    nights = Nights(tmp_path_factory.mktemp("nights"), model, sampling=sampling)
    files: dict[str, list[Any]] = {f"{n:02d}": people(30)[n : n + 8] for n in (10, 0, 20)}
    for name, rows in files.items():
        nights.write(name, rows)
    nights.run()
    for edits in each:
        edited(nights, files, edits)
        nights.check()


def main(job: Path, number: int) -> None:
    """Run the job and die at this operation."""
    keeping.SETTLED_S, segments._BYTES = -1.0, 1
    state.FileOps = lambda: FailingOps(number)  # type: ignore[assignment,misc]
    run(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
