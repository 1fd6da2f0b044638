from __future__ import annotations

import datetime
import io
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, fields
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pytest
from ruamel.yaml import YAML

import batchinfer
from batchinfer.core.errors import InputMissing, JobFileError, Locked, UsageError
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.pipeline import options
from tests.batchinfer.wrong_jobs import FAKE, ROWS, SECTIONS, Place, environment
from tests.memory_transport import FakeTransport

DOCUMENT = Path(__file__).parents[3] / "docs" / "library.md"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = partial(options.RunOptions, engine=FAKE, transport=FakeTransport())
    monkeypatch.setattr(options, "RunOptions", replaced)


def test_a_job_is_run_and_its_result_read(
    place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    result = batchinfer.run(place.folder / "job.yaml")
    assert tuple(capfd.readouterr()) == ("", "")  # progress is off by default
    assert {name: signal.getsignal(name) for name in before} == before
    assert "HF_HUB_OFFLINE" not in os.environ
    assert (result.exit_code, result.status, result.message) == (0, "published", None)
    assert (result.rows, result.rows_ok, result.rows_error) == (20, 20, 0)
    assert (result.computed, result.reused) == (20, 0)
    assert result.report.is_file()
    table = result.to_arrow()
    assert table.column("custom_id").to_pylist() == [row["id"] for row in ROWS]
    assert result.to_pandas()["row_id"].tolist() == list(range(20))
    assert result.to_polars()["custom_id"].to_list() == table.column("custom_id").to_pylist()
    assert result.to_duckdb().aggregate("status, count(*)").fetchall() == [("ok", 20)]
    with duckdb.connect() as mine:
        assert len(result.to_duckdb(mine).filter("row_id < 3").fetchall()) == 3
    with pytest.raises(FrozenInstanceError):
        result.exit_code = 1  # type: ignore[misc]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    again = batchinfer.run(place.folder)  # the folder of a job.yaml, as on the command line
    assert (again.status, again.report, again.computed) == ("already published", None, None)
    assert os.environ["HF_HUB_OFFLINE"] == "0"
    result.results.rename(place.folder / "elsewhere")
    with pytest.raises(InputMissing, match="no longer there"):
        result.to_arrow()


def test_overrides_are_pythons_values(place: Place) -> None:
    settings = {
        "output.path": place.folder / "out/64",
        "output.columns": ["text"],
        "sampling.max_tokens": 4,
        "sampling.seed": 7,
    }
    result = batchinfer.run(str(place.folder / "job.yaml"), settings, limit=3)
    assert (result.results.name, result.rows) == ("64-first-3", 3)
    assert "rows=3" in repr(result)
    assert set(re.findall(r"\b\w+(?==)", repr(result))) == {field.name for field in fields(result)} - {"row"}
    with pytest.raises(JobFileError, match="max_tokens"):
        batchinfer.run(place.folder / "job.yaml", {"sampling.max_tokens": "many"})


def test_a_job_may_be_a_dict(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths start at the working directory. A job file gives the same result."""
    given: dict[str, Any] = {name: YAML(typ="safe").load(text)[name] for name, text in SECTIONS.items()}
    given["model"]["path"] = place.folder / "model"
    monkeypatch.chdir(place.folder)
    result = batchinfer.run(given, {"sampling.max_tokens": 4})
    assert (result.status, result.rows_ok) == ("published", 20)
    assert result.results == place.results
    same = batchinfer.run("job.yaml", {"sampling.max_tokens": 4})
    assert same.status == "already published"


@pytest.mark.parametrize(("section", "value", "said"), [
    ("sampling", {"max_tokens": "many"}, r"sampling\.max_tokens: .*many"),
    ("sampling", {"max_tokens": datetime.timedelta(3)}, "found .*timedelta.*; each key must be a text"),
    ("samplin", {}, "samplin: .*did you mean sampling"),
    ("input", {"path": "${NOBODY_SET_THIS}"}, "NOBODY_SET_THIS"),
    ("output", {"path": b"out"}, "found .*bytes"),
])  # fmt: skip
def test_mistakes_in_a_dict_name_the_key(place: Place, section: str, value: Any, said: str) -> None:
    given = {name: YAML(typ="safe").load(text)[name] for name, text in SECTIONS.items()} | {section: value}
    with pytest.raises(JobFileError, match=said) as caught:
        batchinfer.run(given)
    assert all(mistake.line is None for mistake in caught.value.mistakes)
    assert str(caught.value).startswith(f"{Path.cwd()}/(in-memory job): ")


def test_too_many_errors_that_are_published_come_back(place: Place) -> None:
    place.job("on_error: {max_error_rate: 0.01, publish: true}")
    place.rows(*ROWS, b"{")
    result = batchinfer.run(place.folder / "job.yaml")
    assert (result.exit_code, result.status, result.rows_error) == (65, "published over budget", 1)
    assert sum(result.error_codes.values()) == 1
    assert "max_error_rate" in (result.message or "")
    assert result.to_arrow().num_rows == 21


def test_what_the_command_would_end_with_is_raised(place: Place) -> None:
    with state_of(load_job(place.folder / "job.yaml")).lock(), pytest.raises(Locked) as caught:
        batchinfer.run(place.folder / "job.yaml")
    assert caught.value.exit_code == 75


def test_a_thread_may_run_a_job_and_show_its_progress(
    place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    """No signal handler can be installed in a worker thread of a notebook or scheduler."""
    with ThreadPoolExecutor(1) as workers, io.StringIO() as stream:
        result = workers.submit(batchinfer.run, place.folder / "job.yaml", progress=stream).result(120)
        assert result.rows_ok == 20
        assert "nightly: " in stream.getvalue()
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.slow
def test_a_script_needs_no_guard_and_imports_little(place: Place) -> None:
    """The engine's process does not run the script again."""
    (place.folder / "script.py").write_text(
        "import sys, batchinfer\n"
        "print([n for n in ('torch', 'pyarrow', 'duckdb', 'pydantic') if n in sys.modules])\n"
        "from functools import partial\nfrom batchinfer.pipeline import options\n"
        f"options.RunOptions = partial(options.RunOptions, engine={FAKE!r})\n"
        "print(batchinfer.run('job.yaml').rows_ok, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=place.folder, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n20 False\n", "")
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        batchinfer.walk  # type: ignore[attr-defined] # noqa: B018


def test_every_field_is_documented_and_the_example_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = DOCUMENT.read_text("utf-8")
    assert re.findall(r"(?m)^\| `(\w+)`", text) == [field.name for field in fields(batchinfer.RunResult)]
    monkeypatch.chdir(place.folder)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)  # noqa: S102
    assert capsys.readouterr().out == "published 20 0\n"


class Unknown:
    """Not a valid value of any argument."""

    def __repr__(self) -> str:
        """Without its address: the names of parametrised tests must not change."""
        return "Unknown()"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"limit": value} for value in (0, -5, "3", 2.0, True, Unknown())),
        *({"price_per_hour": value} for value in (-1, float("nan"), float("inf"), "3", True)),
        *({name: 1} for name in ("replace", "retry_errors", "verify", "openai_timestamps")),
        *({"replace": "no"}, {"date": 20260101}, {"to_openai": 3}, {"to_openai": ""}, {"progress": 3}),
        *(
            {"overrides": value}
            for value in ([("a", 1)], {1: 2}, {"name": Unknown()}, {"name": float("nan")})
        ),
        *({"job": value} for value in (3, None, b"job.yaml", "job\0.yaml")),
    ],
    ids=str,
)
def test_an_argument_that_cannot_be_is_refused_before_anything_happens(
    place: Place, wrong: dict[str, Any]
) -> None:
    before = sorted(place.folder.rglob("*"))
    given: dict[str, Any] = {"job": place.folder / "job.yaml", **wrong}
    with pytest.raises(UsageError) as refused:
        batchinfer.run(**given)
    assert next(iter(wrong)) in str(refused.value)
    assert refused.value.exit_code == 2
    assert sorted(place.folder.rglob("*")) == before
