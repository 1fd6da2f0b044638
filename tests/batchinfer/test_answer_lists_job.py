"""Runs whole jobs with lists of answers (output.explode: false), and with a row per answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.pipeline.options import RunOptions
from batchinfer.store.results.diff import DiffOptions, diff_results
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table
from tests.batchinfer.test_samples_job import job, rows_of
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place

REAL = RunOptions(waves_from_s=float("inf"))
LISTS = ("output.explode", "false")
PAGE = Path(__file__).parents[2] / "docs/output.md"
OF_ROW = ("row_id", "file", "row_index", "custom_id", "prompt_tokens", "age")
ERRORS = ("error_code", "error_class", "error_message", "retryable")


def answers(path: Path) -> list[dict[str, Any]]:
    """Return the result of a job with a row per answer."""
    return sorted(table(path), key=lambda row: (row["row_id"], row["sample_index"]))


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of single answers grouped into lists."""
    found = []
    for number in sorted({row["row_id"] for row in rows}):
        own = [row for row in rows if row["row_id"] == number]
        failed = [row for row in own if row["status"] == "error"]
        one = {name: own[0][name] for name in OF_ROW}
        one |= {name: failed[0][name] if failed else None for name in ERRORS}
        one |= {"status": "error" if len(failed) == len(own) else "ok"}
        asked = [row["prompt_logprobs"] for row in own if row.get("prompt_logprobs") is not None]
        one |= {"prompt_logprobs": asked[0] if asked else None} if "prompt_logprobs" in own[0] else {}
        found.append(one | {name: [row[name] for row in own] for name in own[0] if name not in one})
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(("sampling", "per_file"), [({}, 3), ({"best_of": 5}, 2), ({"best_of": 5}, 100)])
def test_lists_equal_the_rows_of_single_answers(
    tmp_path: Path, model: Path, sampling: dict[str, Any], per_file: int
) -> None:
    """Rows have log-probabilities of answers and prompts. Changing the option computes nothing."""
    rows: list[Any] = rows_of(8)
    rows[3]["text"] = None
    asked = sampling | {"logprobs": 1, "prompt_logprobs": 0}
    path = job(tmp_path, model, rows, 3, sampling=asked, on_error={"max_error_rate": 0.5})
    assert run(path, REAL).exit_code == 0
    rows_each = answers(path)
    outcome = run(path, NO_ENGINE, LISTS, ("output.rows_per_file", str(per_file)))
    assert (outcome.exit_code, outcome.row["rows"]) == (0, 8)
    assert table(path) == grouped(rows_each)
    files = sorted((tmp_path / "out/res").glob("*.parquet"))
    assert [pq.read_metadata(file).num_rows for file in files][:1] == [min(per_file, 8)]
    assert table(path)[3]["generated_text"] == [None] * 3
    manifest = json.loads((tmp_path / "out/res/_manifest.json").read_text())
    assert (manifest["rows"], manifest["ok"], manifest["errors"]) == (8, 7, 1)
    again = run(path, NO_ENGINE, ("output.rows_per_file", str(per_file)))
    assert again.exit_code == 0
    assert answers(path) == rows_each


def test_a_row_keeps_the_answers_that_did_not_fail(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "3")
    path = job(tmp_path, model, rows_of(12), 4, on_error={"max_error_rate": 1.0})
    assert run(path, FAKE).exit_code == 0
    each = answers(path)
    assert run(path, NO_ENGINE, LISTS).exit_code == 0
    found = table(path)
    assert found == grouped(each)
    partly = [row for row in found if row["status"] == "ok" and row["error_code"] == "fake_failure"]
    assert partly, "else nothing is shown"
    for row in partly:
        assert None in row["generated_text"]
        assert any(text is not None for text in row["generated_text"])
    assert "fake_failure" in {row["error_code"] for row in found}


@pytest.mark.slow
def test_the_page_s_example_runs(place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text("utf-8").partition("### Lists of answers")[2].partition("\n## ")[0]
    (lines,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    (query,) = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    sampling, output = lines.splitlines()
    assert cli_of(FAKE_ENGINE)("run", place.job(sampling=sampling, output=output)).code == 0
    monkeypatch.chdir(place.folder)
    assert len(duckdb.sql(query).fetchall()) == 80


@pytest.mark.slow
def test_every_verb_knows_lists(place: Place, cli_of: CliOf) -> None:
    verbs = cli_of(FAKE_ENGINE)
    sampling = "sampling: {max_tokens: 8, temperature: 1.0, n: 4}"
    path = place.job(sampling=sampling, output="output: {path: out/res, columns: [text], explode: false}")
    for verb in ("validate", "plan", "preview", "run"):
        assert verbs(verb, path).code == 0
    assert json.loads(verbs("query", place.results, "SELECT count(*) AS n FROM results", "--json").out) == {
        "n": 20
    }
    for verb in ("report", "verify", "status"):
        ended = verbs(verb, place.results)
        assert ended.code == 0, ended.err
    assert verbs("diff", place.results, place.results).code == 0
    each, other = (place.folder / name for name in ("each", "other"))
    usual = sampling.replace("8", "3")
    assert verbs("run", place.job(sampling=usual, output=f"output: {{path: {each}}}")).code == 0
    lists = f"output: {{path: {other}, explode: false}}"
    assert verbs("run", place.job(sampling=usual, output=lists)).code == 0
    told = json.loads(verbs("diff", place.results, other, "--json").out)
    assert (told["matched"], told["rows_a"]) == (20, 20)
    files = [sorted(folder.glob("*.parquet")) for folder in (place.results, each)]
    with pytest.raises(UsageError, match="A has lists of answers per row, and B has one row per answer"):
        diff_results(*files, DiffOptions())
