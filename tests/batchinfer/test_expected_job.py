"""Runs jobs whose input has right answers: measures, changing labels, and the page docs/accuracy.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer import run
from batchinfer.store.results.diff import DiffOptions
from batchinfer.verbs.diff import compare_results
from batchinfer.verbs.query import open_result
from batchinfer.verbs.report_page import write_page
from tests.batchinfer.test_deterministic_job import last
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, CliOf, Command, Place

PAGE = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text("utf-8")
LABELLED = "input: {path: rows.jsonl, id: id, expected: label}"


@pytest.fixture
def fake(cli_of: CliOf) -> Command:
    return cli_of(FAKE)


def queried(results: Path, sql: str) -> list[dict[str, Any]]:
    with open_result(results, False) as opened, opened.answer(sql) as found:
        rows: list[dict[str, Any]] = found.to_arrow_table().to_pylist()
    return rows


def answers(place: Place, fake: Command) -> dict[str, str]:
    """Return the fake engine's answers by row id."""
    assert fake("run", place.job()).code == 0
    return {row["custom_id"]: row["generated_text"] for row in place.table()}


def labelled(place: Place, found: dict[str, str], wrong: int) -> None:
    """Label the rows: `wrong` wrong ones, one that differs in case, one null, the others right."""
    rows = []
    for at, (name, text) in enumerate(found.items()):
        label = "nothing like it" if at < wrong else {wrong: f" {text.upper()}!"}.get(at, text)
        rows.append({"id": name, "text": f"word {name[1:]}", "label": None if at == wrong + 1 else label})
    place.rows(*rows)


def test_labels_that_change_are_published_and_measured_without_computing(
    place: Place, fake: Command, cli_of: CliOf
) -> None:
    found = answers(place, fake)
    labelled(place, found, 4)
    job = place.job(input=LABELLED)
    none = cli_of(NO_ENGINE)
    done = none("run", job)
    assert done.code == 0, done.err
    row = last(place, "run")[0]
    counts = ("labelled_rows", "unlabelled_rows", "exact_rows", "normalised_rows")
    assert [row[name] for name in counts] == [19, 1, 14, 15]
    assert row["accuracy"] == pytest.approx(14 / 19)
    assert not row["computed_requests"]
    assert "73.7% of 19 labelled rows exactly, 78.9% normalised, 1 row not measured" in done.err + done.out
    first = place.published()

    labelled(place, found, 9)
    assert none("run", job).code == 0
    assert last(place, "run")[0]["accuracy"] == pytest.approx(9 / 19)
    assert place.published().keys() != first.keys()
    assert [one["label"] for one in place.table()][:9] == ["nothing like it"] * 9

    told = none("history", place.folder / "out/res")
    head, *nights = told.out.splitlines()
    assert head.split()[-3:] == ["labelled", "right", "normalised"]
    assert [line.split()[-3:] for line in nights[1:3]] == [["19", "73.7%", "78.9%"], ["19", "47.4%", "52.6%"]]
    assert none("report", place.folder / "out/res").code == 0
    page = (place.folder / "out/res-report/report.html").read_text("utf-8")
    assert "Right answers" in page
    assert "19 rows with an expected answer" in page


@pytest.mark.parametrize(("prompt", "told"), [
    ('prompt: {user: "Say {{ text }}"}', None),
    ('prompt: {user: "Say {{ text }} {{ label }}"}', "the column 'label', the right answer"),
    ('prompt: {user: "Say {{ row | tojson }}"}', "`row`, which holds the column 'label', the right answer"),
])  # fmt: skip
def test_a_prompt_that_holds_the_answer_is_warned_of(
    place: Place, fake: Command, prompt: str, told: str | None
) -> None:
    place.rows({"id": "a", "text": "hello", "label": "x"})
    done = fake("validate", place.job(input=LABELLED, prompt=prompt))
    assert done.code == 0
    text = " ".join((done.out + done.err).split())
    assert ("input.expected" in text) == (told is not None)
    assert told is None or told in text


SHAPE = {
    "type": "object",
    "properties": {"state": {"enum": ["open", "paid"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["state", "count"],
}  # fmt: skip


def test_typed_answers_are_measured_by_field(tmp_path: Path, model: Path) -> None:
    """A tiny model, labels of Parquet as a struct, some with one field, and a rerun without computing."""
    labels = 3 * [
        {"state": "open", "count": 1}, {"state": "paid", "count": None}, None, {"state": None, "count": 3}
    ]  # fmt: skip
    kind = pa.struct([("state", pa.string()), ("count", pa.int64())])
    table = pa.table({"text": [f"word {n}" for n in range(12)], "label": pa.array(labels, kind)})
    pq.write_table(table, tmp_path / "rows.parquet")
    job = {
        "name": "typed",
        "model": {"path": str(model)},
        "input": {"path": str(tmp_path / "rows.parquet"), "expected": "label"},
        "prompt": {"user": "Say {{ text }}"},
        "sampling": {"max_tokens": 60, "temperature": 1.0},
        "engine": {"device": "cpu"},
        "output": {"path": str(tmp_path / "res"), "schema": SHAPE},
    }
    done = run(job)
    rows = done.to_arrow().to_pylist()
    pairs = [(row, row["label"]) for row in rows if row["label"]]
    wanted = [all(row[name] == one for name, one in label.items() if one is not None) for row, label in pairs]
    assert (done.row["labelled_rows"], done.row["unlabelled_rows"]) == (9, 3)
    assert done.row["exact_rows"] == sum(wanted)
    fields = {one["field"]: one for one in queried(tmp_path / "res", "FROM accuracy")}
    assert fields.keys() == {None, "state", "count"}
    for name in SHAPE["properties"]:
        right = [row[name] == label[name] for row, label in pairs if label[name] is not None]
        assert (fields[name]["labelled_rows"], fields[name]["exact_rows"]) == (6, sum(right))

    answered = [{"state": row["state"], "count": row["count"]} for row in rows]
    pq.write_table(table.set_column(1, "label", pa.array(answered, kind)), tmp_path / "rows.parquet")
    again = run(job)
    assert (again.computed or 0, again.row["accuracy"], again.row["labelled_rows"]) == (0, 1.0, 12)
    assert again.row["prompt_tokens_run"] in (None, 0)


def test_the_page_is_right(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("yaml", "json", "sql")}
    Path("reviews.jsonl").write_text(
        blocks["json"][0] + blocks["json"][0].replace('"text": "', '"text": "So: ')
    )
    Path("job.yaml").write_text(blocks["yaml"][0])
    set_here = {"model.path": model, "engine.device": "cpu"}
    done = run("job.yaml", set_here | {"output.path": "out/res"})
    rows = done.to_arrow().to_pylist()
    near = [row["generated_text"] == (row["sentiment"] or "").lower().rstrip(".") for row in rows]
    assert (done.row["labelled_rows"], done.row["unlabelled_rows"]) == (10, 2)
    assert done.row["exact_rows"] == sum(row["generated_text"] == row["sentiment"] for row in rows)
    assert done.row["normalised_rows"] == sum(near)
    wrong, confused = (queried(done.results, sql) for sql in blocks["sql"][:2])
    assert queried(done.results, "SELECT sum(rows) AS n FROM confusion") == [{"n": 10}]
    assert len(wrong) == 10 - done.row["exact_rows"]
    assert sum(one["rows"] for one in confused) == 10 - sum(near)
    assert {one["expected"] for one in confused} <= {"positive", "negative", "neutral"}

    other = run("job.yaml", set_here | {"output.path": "out/other", "prompt.user": "{{ text }} Is it good?"})
    diff = compare_results(done.results, other.results, DiffOptions(by="row_id"))
    assert diff.accuracy is not None
    pairs = [(one, two) for one, two in zip(right(rows), right(other.to_arrow().to_pylist()), strict=True)]
    assert diff.accuracy.rows == 10
    assert (diff.accuracy.exact.only_a, diff.accuracy.exact.only_b) == (
        sum(a and not b for a, b in pairs),
        sum(b and not a for a, b in pairs),
    )


def right(rows: list[dict[str, Any]]) -> list[bool]:
    return [row["generated_text"] == row["sentiment"] for row in rows]


def test_labels_are_measured_with_their_probabilities(
    tmp_path: Path, model: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("yaml", "sql")}
    moods = (" Positive", "negative", "mixed", None)
    lines = [json.dumps({"id": f"r{n}", "body": f"Soup {n}.", "mood": moods[n % 4]}) for n in range(40)]
    Path("reviews.jsonl").write_text("\n".join(lines))
    Path("job.yaml").write_text(blocks["yaml"][1])
    set_here = {"model.path": model, "engine.device": "cpu", "output.path": "out/res"}
    done = run("job.yaml", set_here)
    found = done.to_arrow().to_pylist()
    rows = [row for row in found if row["mood"] is not None]
    p = np.array([row["probability"] for row in rows])
    right = np.array([row["label"] == row["mood"].strip().lower() for row in rows])
    assert (done.row["labelled_rows"], done.row["normalised_rows"]) == (30, right.sum())
    assert done.row["exact_rows"] == sum(row["label"] == row["mood"] for row in rows)
    assert done.row["mean_probability"] == pytest.approx(p.mean())
    assert done.row["brier_score"] == pytest.approx(((p - right) ** 2).mean())
    bins = np.minimum((p * 10).astype(int), 9)
    error = sum(abs((p - right)[bins == at].sum()) for at in range(10)) / len(p)
    assert done.row["calibration_error"] == pytest.approx(error)
    table = queried(done.results, blocks["sql"][2])
    assert queried(done.results, "SELECT sum(rows) AS n FROM confusion") == [{"n": 30}]
    assert [one["from_probability"] * 10 for one in table] == pytest.approx(sorted({*bins.tolist()}))
    assert sum(one["rows"] for one in table) == 30
    write_page(done.results, tmp_path / "page.html")
    assert "Probabilities and right answers" in (tmp_path / "page.html").read_text("utf-8")
    spelled = [
        json.loads(line) | {"mood": f" {row['label'].upper()}"}
        for line, row in zip(lines, found, strict=True)
    ]
    Path("reviews.jsonl").write_text("\n".join(map(json.dumps, spelled)))
    again = run("job.yaml", set_here)
    assert (again.computed or 0, again.row["exact_rows"], again.row["normalised_rows"]) == (0, 0, 40)
    every = np.array([row["probability"] for row in found])
    assert again.row["brier_score"] == pytest.approx(((1 - every) ** 2).mean())
    head, *nights = cli_of(NO_ENGINE)("history", again.results).out.splitlines()
    assert head.endswith("calibration error  Brier score")
    counts = [
        [f"{night.row[name]:.3f}" for name in ("calibration_error", "brier_score")] for night in (done, again)
    ]
    assert [line.split()[-2:] for line in nights[:2]] == counts
