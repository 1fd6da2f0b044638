"""Tests README and docs: links exist, examples load, queries run, and commands exist."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from batchinfer.cli import app
from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from tests import reference

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "jobs").rglob("*.md")])
VERBS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page):
    for verb in re.findall(r"`batchinfer ([a-z]+)", page.read_text()):
        assert verb in VERBS, f"{page.name} names the verb {verb!r}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert target in targets, f"{page.name} names make {target}"


@pytest.mark.parametrize("page", reference.PAGES)
def test_reference_tables_are_current_and_complete(page):
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert reference.generated(text) == text, f"tables of {page} differ from the code: {reference.FIX}"
    assert sorted(reference.named(page)) == sorted(reference.names(page))


def test_the_readmes_job_is_right(tmp_path):
    (tmp_path / "models/qwen2.5-7b").mkdir(parents=True)
    (tmp_path / "job.yaml").write_text(fenced(ROOT / "README.md", "yaml")[0])
    job = load_job(tmp_path / "job.yaml")
    assert job.name == "ticket-triage"


def test_the_readmes_job_reports_its_missing_model(tmp_path):
    (tmp_path / "job.yaml").write_text(fenced(ROOT / "README.md", "yaml")[0])
    with pytest.raises(JobFileError, match=re.escape("models/qwen2.5-7b")):
        load_job(tmp_path / "job.yaml")


def test_the_readmes_queries_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = pa.table(
        {
            "status": ["ok", "ok", "error"],
            "error_code": [None, None, "bad_json"],
            "generated_text": ["a", "b", None],
            "expected": ["a", "c", None],
        }
    )
    for name in ("tickets", "quickstart"):
        (tmp_path / "results" / name).mkdir(parents=True)
        pq.write_table(rows, tmp_path / "results" / name / "part.parquet")
    (tmp_path / "results/quickstart-typed").mkdir()
    due = pa.array([date(2026, 3, 14), date(2026, 3, 14), None])
    orders = pa.table({"customer": ["Ann", "Ann", None], "due": due, "quantity": [12, 3, None]})
    pq.write_table(orders, tmp_path / "results/quickstart-typed/part.parquet")
    typed, by_status, accuracy = (duckdb.sql(q).fetchall() for q in fenced(ROOT / "README.md", "sql"))
    assert set(typed) == {("Ann", date(2026, 3, 14), 15), (None, None, None)}
    assert len(by_status) == 2
    assert accuracy == [(1, 2, 50.0)]


def test_ci_runs_the_suite_of_the_readme():
    assert any("make test" in block for block in fenced(ROOT / "README.md", "sh"))
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


def test_the_map_of_the_house_names_every_room():
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    packages = [p.parent for p in (ROOT / "batchinfer").rglob("__init__.py") if p.parent.name != "batchinfer"]
    rooms = {str(package.relative_to(ROOT / "batchinfer")) for package in packages}
    assert {room for room in rooms if f"{room}/" not in page} == set()
