"""Tests published files that changed on disk: readers give right values or exit code 74, and a run repairs
them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import BatchInferError
from batchinfer.pipeline.result import RunResult
from batchinfer.store.results.diff import DiffOptions
from batchinfer.verbs.diff import compare_results
from batchinfer.verbs.query import open_answer
from batchinfer.verbs.verify import verify_results
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, CliOf, Place, copy_of, flip, make_place, run_once
from tests.examples import everything

ROWS = "from results order by row_id"
JOB = {"output": "output: {path: out/res, columns: [text], rows_per_file: 7}"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    place = make_place(tmp_path_factory.mktemp("finished") / "job", model)
    place.job(**JOB)
    return run_once(place)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory, finished: Place) -> Path:
    """The result of an earlier run with all rows except one."""
    place = copy_of(finished, tmp_path_factory.mktemp("older") / "job")
    place.rows(*({"id": f"r{i}", "text": f"word {i or 'other'}"} for i in range(20)))
    run_once(place)
    return place.results


@pytest.fixture
def copy(finished: Place, tmp_path: Path) -> Place:
    """A copy to damage, with its own job file that has also run."""
    return run_once(copy_of(finished, tmp_path / "copy"))


def result_of(place: Place) -> RunResult:
    return RunResult(place.results, 0, "published", None, None, 20, 20, 0, {}, 0, 20, {})


def readers(place: Place, whole: Path) -> dict[str, Callable[[], Any]]:
    """Return all readers of a result by name.

    Args:
        whole: an undamaged copy of the result.
    """
    return {
        "query": lambda: _fetched(place.results),
        "report folder": lambda: _fetched(place.results.with_name("res-report")),
        "diff": lambda: compare_results(place.results, whole, DiffOptions()).different,
        "to_arrow": lambda: result_of(place).to_arrow().to_pylist(),
        "to_duckdb": lambda: result_of(place).to_duckdb().order("row_id").fetchall(),
    }


def _fetched(folder: Path) -> Any:
    with open_answer(folder, ROWS, partial=False) as answer:
        return answer.fetchall()


def check(place: Place, whole: Path, right: dict[str, Any], damaged: str, harmless: bool = False) -> None:
    """Check the readers of a damaged result.

    Args:
        damaged: file name that messages contain.
        harmless: if True, readers may also be right.
    """
    for name, read in readers(place, whole).items():
        value, error = attempt(read)
        if error is None:
            assert harmless, (name, damaged)
            assert value == right[name], (name, damaged)
            continue
        assert error.exit_code == 74, (name, damaged, error)
        assert damaged in str(error), (name, damaged, error)
        assert "--repair" in str(error), (name, damaged, error)


def attempt(read: Callable[[], Any]) -> tuple[Any, BatchInferError | None]:
    try:
        return read(), None
    except BatchInferError as error:
        return None, error


def right_values(finished: Place) -> dict[str, Any]:
    return {name: read() for name, read in readers(finished, finished.results).items()}


def offsets(size: int) -> Sequence[int]:
    """Return offsets to damage: middle and end, or in full tests every 61st, 600 per file with three masks."""
    return range(0, size, 61) if everything() else [size // 2, size - 9]


def masks() -> Sequence[int]:
    return (0x01, 0x40, 0xFF) if everything() else (0x40,)


def test_a_flipped_byte_is_an_error_or_changes_nothing(finished: Place, copy: Place) -> None:
    right = right_values(finished)
    for path in sorted(copy.results.iterdir()):
        data = path.read_bytes()
        for at in offsets(len(data)):
            for mask in masks():
                flip(path, at, mask)
                # the endpoint of an OpenAI request is never read
                check(copy, finished.results, right, path.name, harmless=b"endpoints" in data)
                path.write_bytes(data)
    check(copy, finished.results, right, "", harmless=True)
    assert verify_results(copy.results).problems == []


def changed(folder: Path, older: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield ways to damage a result, each with the file name in the message."""
    first, *_, last = sorted(folder.glob("*.parquet"))
    manifest = folder / "_manifest.json"
    old = sorted(older.glob("*.parquet"))[0]
    yield first.name, lambda: first.write_bytes(first.read_bytes()[:-10])
    yield last.name, lambda: last.write_bytes(b"")
    yield first.name, first.unlink
    yield last.name, lambda: shutil.copy(old, last)
    yield first.name, lambda: shutil.copy(last, first)
    yield first.name, lambda: (first.unlink(), first.mkdir())
    yield manifest.name, manifest.unlink
    yield manifest.name, lambda: manifest.write_bytes(manifest.read_bytes()[:-100])
    yield manifest.name, lambda: manifest.write_bytes(b"")
    yield manifest.name, lambda: manifest.write_text("[]")
    yield manifest.name, lambda: manifest.write_text(manifest.read_text().replace('"ok": 20', '"ok": 19'))
    yield "part-", lambda: shutil.copy(older / manifest.name, manifest)


def test_a_run_repairs_files_that_readers_refuse(
    finished: Place, copy: Place, older: Path, cli_of: CliOf
) -> None:
    """Answers come from the store: no engine starts."""
    before, run = copy.published(), cli_of(NO_ENGINE)
    cases = range(12) if everything() else (3, 11)
    for case in cases:
        name, damage = list(changed(copy.results, older))[case]
        damage()
        check(copy, finished.results, {}, name)
        verified = run("verify", copy.results)
        assert (verified.code, name in verified.err) == (74, True)
        assert f"batchinfer run {copy.folder / 'job.yaml'} --verify" in verified.err
        ended = run("run", copy.folder / "job.yaml")
        assert ended.code == 0, ended.err
        assert "the result is published again" in ended.err
        assert copy.published() == before
    again = run("run", copy.folder / "job.yaml")
    assert (again.code, "published again" in again.err) == (0, False)


def test_repair_recomputes_answers_damaged_in_the_store(copy: Place, cli_of: CliOf) -> None:
    before = copy.published()
    next(copy.results.glob("*.parquet")).unlink()
    (part,) = (copy.state / "completions").glob("part-*.parquet")
    flip(part, part.stat().st_size // 2)
    run = cli_of(FAKE)
    ended = run("verify", copy.results, "--repair")
    assert ended.code == 0, ended.err
    assert "its rows run again" in ended.err
    assert "0 problems" in ended.out
    assert copy.published() == before
    untouched = run("verify", copy.results, "--repair")
    assert (untouched.code, untouched.err) == (0, "")


def test_repair_runs_a_trial_with_its_old_settings(place: Place, cli_of: CliOf) -> None:
    job = place.job(output="output: {path: 'out/res/${date}'}")
    options = ("--date", "2026-01-02", "--set", "sampling.max_tokens=3", "-q")
    run = cli_of(FAKE)
    assert run("run", job, *options, "--limit", "4").code == 0
    trial = place.folder / "out/res-first-4"
    before = {path.name: path.read_bytes() for path in trial.iterdir()}
    (trial / "_manifest.json").unlink()
    assert run("verify", trial, "--repair").code == 0
    assert {path.name: path.read_bytes() for path in trial.iterdir()} == before


def test_repair_without_a_note_names_the_step(copy: Place, cli_of: CliOf) -> None:
    """As for results of older versions, or without state."""
    shutil.rmtree(copy.state)
    next(copy.results.glob("*.parquet")).unlink()
    run = cli_of(NO_ENGINE)
    ended = run("verify", copy.results, "--repair")
    assert (ended.code, "batchinfer run JOB.YAML --verify" in ended.err) == (2, True)
    (copy.results / "_manifest.json").write_text("{}")
    refused = run("run", copy.folder / "job.yaml")
    assert (refused.code, "move" in refused.err) == (73, True)


def test_a_damaged_part_of_the_store_is_never_published(copy: Place, cli_of: CliOf) -> None:
    """Its answers are computed again, also without --verify."""
    before = copy.published()
    (part,) = (copy.state / "completions").glob("part-*.parquet")
    flip(part, part.stat().st_size // 2)
    shutil.rmtree(copy.results)
    ended = cli_of(FAKE)("run", copy.folder / "job.yaml", "--json")
    assert (ended.code, json.loads(ended.out)["computed_requests"]) == (0, 20)
    assert copy.published() == before


@pytest.mark.slow
def test_errors_are_counted_from_a_result_that_is_whole(place: Place, cli_of: CliOf) -> None:
    """The message "already published" reads the number of error rows from the result."""
    place.rows(*({"id": f"r{i}", "text": f"word {i}"} for i in range(19)), {"id": "bad"})
    job = place.job("on_error: {max_error_rate: 0.5}")
    run = cli_of(FAKE)
    first = json.loads(run("run", job, "--json").out)
    part = next(place.results.glob("*.parquet"))
    for at in range(50, part.stat().st_size, part.stat().st_size // 2):
        flip(part, at)
        told = json.loads(run("run", job, "--json").out)
        assert (told["exit_status"], told["error_codes"]) == ("published", first["error_codes"])
