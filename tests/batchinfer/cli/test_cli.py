"""Verbs as a user sees them: help, documentation, output, signals, and runs after a kill."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer.core import errors
from tests import warm_commands
from tests.batchinfer.wrong_jobs import (
    FAKE,
    NO_ENGINE,
    ROWS,
    CliOf,
    Ended,
    Place,
    alive,
    children,
    copy_of,
    environment,
    flip,
    hears_signals,
    make_place,
    run_once,
)
from tests.examples import everything, first_of
from tests.patience import PATIENCE_S, wait_until
from tests.reference import VERBS

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "cli.md"
# A step has 4 rows and takes 0.3 s: the run outlasts what tests do in parallel.
MANY = [{"id": f"r{i}", "text": f"word number {i}"} for i in range(160)]
SLOW = {"FAKE_ENGINE_DELAY_S": "0.3", "FAKE_ENGINE_BATCH": "4"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Place:
    """A job that ran once. Tests that change it copy it."""
    return run_once(make_place(tmp_path_factory.mktemp("finished") / "job", model))


@contextmanager
def started(place: Place, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command line with the fake engine as a process. It is killed at the end of the block."""
    process = warm_commands.start(
        [sys.executable, "-m", "tests.fake_cli", *arguments],
        cwd=place.folder, env=environment(**env), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, preexec_fn=hears_signals,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


# --- help and documentation


def sections() -> dict[str, str]:
    """The sections of docs/cli.md by heading."""
    parts = re.split(r"^## ", REFERENCE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].strip().strip("`"): part for part in parts}


def test_every_verb_and_option_has_help_and_every_verb_is_documented() -> None:
    assert [name for name in sections() if name != "Exit codes"] == list(VERBS)
    for name, verb in VERBS.items():
        assert verb.help
        for parameter in verb.params:
            assert parameter.name == "help" or parameter.help, f"{name} {parameter.name}"


def test_help_has_no_links(cli_of: CliOf) -> None:
    shown = cli_of(NO_ENGINE)("run", "--help").out
    assert "OpenAI batch output file" in " ".join(shown.replace("│", " ").split())
    assert not re.search(r"`|\]\(|\.md", shown)


def kinds(of: type[errors.BatchInferError]) -> Iterator[type[errors.BatchInferError]]:
    yield of
    for kind in of.__subclasses__():
        yield from kinds(kind)


def test_every_exit_code_is_documented() -> None:
    told = set(map(int, re.findall(r"(?m)^\| (\d+)", sections()["Exit codes"])))
    assert told == {0, 129, 130, 143} | {kind.exit_code for kind in kinds(errors.BatchInferError)}


TORCH = {"torch", "transformers", "tokenizers"}
FILES = {"duckdb", "pyarrow", "numpy"}
RUN = {"batchinfer.pipeline.run", "batchinfer.plan.simulation.simulator"}
# Modules that a verb does not import. One process runs all verbs in this order, so imports only add up.
UNUSED: list[tuple[list[str], set[str]]] = [
    # a shell's completion starts the program at each key
    (["--help"], {*TORCH, *FILES, *RUN, "jinja2", "pydantic", "batchinfer.models.families.family"}),
    (["bench", "--help"], {*TORCH, *FILES, *RUN, "jinja2", "batchinfer.models.families.family"}),
    (["status", "nowhere"], {*TORCH, *FILES, *RUN}),
    (["query", "nowhere", "FROM run"], {*TORCH, *RUN, "pyarrow.compute"}),
    (["clean", "nowhere.yaml"], {*TORCH, *RUN}),
    (["doctor"], {*TORCH, *RUN}),
    (["validate", "nowhere.yaml"], {"torch", "transformers", *RUN}),
    (["preview", "nowhere.yaml"], {"torch", "transformers", *RUN}),
]


def test_a_verb_imports_only_what_it_uses() -> None:
    code = (
        f"import sys\nfrom batchinfer import cli\nfound = {{}}\nfor words, unused in {UNUSED}:\n"
        "    cli._guarded(words)\n    found |= {name: words for name in unused & {*sys.modules}}\nprint(found)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines()[-1] == "{}"


def test_help_and_version(cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    assert "run" in run("--help").out
    for verb in ("run", "schema infer"):
        assert run(*verb.split(), "-h").code == 0
    assert run("--version").out.startswith("batchinfer ")


# --- output


@pytest.mark.sample(3)
@pytest.mark.parametrize(("arguments", "code"), [
    (("run", "job.yaml", "--json", "--set", "engine.threds=1"), 78),
    (("run", "job.yaml", "--json", "--set", "input.path=gone.jsonl"), 66),
    (("run", "job.yaml", "--json", "--set", 'prompt.user="{{ nobody }}"'), 78),
    (("run", "job.yaml", "--json", "--set", 'prompt.user="{{ text / 2 }}"'), 65),
    (("run", "job.yaml", "--json", "--fast"), 2),
    (("run", "empty.yaml", "--json"), 66),
    (("run", "empty.yaml", "--json", "--set", "input.allow_empty=true"), 0),
])  # fmt: skip
def test_json_is_one_line(
    arguments: tuple[str, ...], code: int, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder)
    place.rows(name="empty.jsonl")
    place.job(file="empty.yaml", input="input: {path: empty.jsonl}", output="output: {path: out/empty}")
    ended = cli_of(NO_ENGINE)(*arguments)
    assert ended.code == code
    (line,) = ended.out.splitlines()
    assert json.loads(line)["exit_code"] == code


def test_a_finished_job_has_nothing_to_do(finished: Place, cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    before = finished.published()
    assert run("run", finished.folder / "job.yaml", "--quiet") == Ended(0, "", "")
    told = json.loads(run("run", finished.folder / "job.yaml", "--json").out)
    assert (told["rows"], told["rows_ok"], told["computed_requests"]) == (len(ROWS), len(ROWS), None)
    assert finished.published() == before


def test_a_folder_or_no_argument_means_its_job_file(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cli_of(FAKE)
    assert run("run", place.folder, "-q") == Ended(0, "", "")
    assert json.loads(run("status", place.folder, "--json").out)["state"] == "finished"
    assert len(json.loads(run("history", place.folder, "--json").out)["runs"]) == 1
    assert run("clean", place.folder, "--dry-run", "--set", "cache.keep=7").code == 0
    monkeypatch.chdir(place.folder)
    for verb in ("validate", "preview", "plan", "run", "status", "clean") if everything() else ("validate",):
        assert run(verb).code == 0, verb
    (place.folder / "job.yaml").unlink()
    for verb in ("validate", "preview", "plan", "run", "status", "clean"):
        ended = run(verb)
        assert (ended.code, ended.out) == (66, "")
        assert "there is no job file job.yaml" in ended.err
    monkeypatch.chdir(place.folder.parent)
    assert "there is no job file job/job.yaml" in run("run", place.folder).err


def test_validate(finished: Place, cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    ended = run("validate", finished.folder / "job.yaml")
    assert ended.code == 0
    for words in (
        "max_tokens: 8",
        "model: llama",
        "with a chat template",
        "input: 1 file",
        "the job file has no mistakes",
    ):
        assert words in ended.out
    assert run("validate", finished.folder / "job.yaml", "--quiet") == Ended(0, "", "")


def test_preview(place: Place, cli_of: CliOf) -> None:
    place.rows(ROWS[0], {"id": "bad"}, *ROWS[1:])
    ended = cli_of(NO_ENGINE)("preview", place.folder / "job.yaml", "--rows", "2")
    assert ended.code == 0
    assert "rows.jsonl row 0, id r0" in ended.out
    assert "<|im_start|>user\nSay word 0<|im_end|>\n<|im_start|>assistant\n" in ended.out
    assert "rows.jsonl row 1, id bad\nerror template_error: " in ended.out
    assert ended.out.startswith("sampling: max_tokens: 8\n")
    assert ended.out.count("sampling") == ended.out.count("temperature") + 1 == 1, (
        "it is said once, for all rows"
    )
    assert "word 1" not in ended.out
    assert not (place.folder / "out").exists()


def test_each_verb_names_the_parameters_of_rows(place: Place, cli_of: CliOf) -> None:
    place.rows(*({**row, "most": 3} for row in ROWS))
    place.job(sampling="sampling: {max_tokens: 8, from_columns: {max_tokens: most}}")
    run = cli_of()
    said = "rows set their own max_tokens (column most)"
    assert said in run("validate", place.folder / "job.yaml").out
    shown = run("preview", place.folder / "job.yaml", "--rows", "1").out
    assert said in shown
    assert "sampling of this row: max_tokens: 3\n" in shown
    assert said in run("run", place.folder / "job.yaml").err
    assert {row["completion_tokens"] for row in place.table()} == {3}
    place.job(file="plain.yaml", output="output: {path: out/plain}")
    for verb in ("validate", "preview", "run") if everything() else ("validate",):
        ended = run(verb, place.folder / "plain.yaml")
        assert ended.code == 0
        assert "rows set their own" not in ended.out + ended.err


@pytest.mark.slow
def test_paths_are_shown_relative_to_the_current_folder(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.folder.parent)
    run, folder = cli_of(), place.folder.name
    told = [run(verb, folder) for verb in ("validate", "plan", "run", "run", "status", "history", "clean")]
    told += [run("verify", place.results.relative_to(place.folder.parent)), run("run", f"{folder}/none.yaml")]
    told += [run("validate", folder, "--set", "prompt.user={{ nothing }}")]
    assert [one.code for one in told] == [0] * 8 + [66, 78]
    shown = "".join(one.out + one.err for one in told)
    assert str(place.folder) not in shown
    assert f"{folder}/job.yaml" in shown
    assert str(place.results.relative_to(place.folder.parent)) in shown


def test_a_job_file_with_a_similar_name_is_proposed(place: Place, cli_of: CliOf) -> None:
    run = cli_of()
    place.job(file="tickets.yaml")
    assert "did you mean" not in run("run", place.folder.parent / "job.yaml").err
    for named, meant in (("tikets.yaml", "tickets.yaml"), ("jop.yaml", "job.yaml")):
        assert f"did you mean {place.folder / meant}?" in run("run", place.folder / named).err


def test_schema(cli_of: CliOf) -> None:
    ended = cli_of(NO_ENGINE)("schema")
    assert set(json.loads(ended.out)["properties"]) >= {"name", "model", "input", "prompt", "output"}


def test_doctor(cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    ended = run("doctor")
    assert ended.code == 0
    assert "torch" in ended.out
    idle = run("doctor", "--although-busy")
    assert (idle.code, idle.out, "add --measure" in idle.err) == (2, "", True)


def test_a_trial_publishes_separately_and_a_run_reuses_its_answers(place: Place, cli_of: CliOf) -> None:
    run = cli_of()
    assert run("run", place.folder / "job.yaml", "--limit", "3", "-q").code == 0
    assert not place.results.exists()
    assert len(pq.read_table(place.folder / "out" / "res-first-3")) == 3
    told = json.loads(run("run", place.folder / "job.yaml", "--json").out)
    assert (told["reused_requests"], told["computed_requests"]) == (3, 17)


def test_verify(finished: Place, tmp_path: Path, cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    ended = run("verify", finished.results)
    assert (ended.code, ended.err) == (0, "")
    assert "0 problems found" in ended.out
    place = copy_of(finished, tmp_path / "copy")
    (part,) = place.results.glob("*.parquet")
    flip(part, part.stat().st_size // 3)
    (stored,) = (place.state / "completions").glob("*.parquet")
    flip(stored, 200)
    ended = run("verify", place.results)
    assert ended.code == 74
    assert f"{part}: its sha256 is not the one in the manifest" in ended.err
    assert str(stored) in ended.err
    nothing = run("verify", place.folder)
    assert (nothing.code, "not a published result" in nothing.err) == (74, True)


# --- signals and kills


def committed(place: Place) -> int:
    """Return the number of stored answers."""
    records = (place.state / "completions").glob("*.json")
    return sum(json.loads(record.read_text())["rows"] for record in records)


def runs(place: Place) -> list[dict[str, Any]]:
    tables = [
        pq.read_table(path).to_pylist()
        for path in (place.folder / "out" / "res-report").glob("run-*.parquet")
    ]
    return sorted((row for table in tables for row in table), key=lambda row: row["finished_at"])


def long_job(place: Place) -> Place:
    place.rows(*MANY)
    place.job("commit: {rows: 4, seconds: 1}")
    return place


def continue_to_the_end(place: Place, cli_of: CliOf) -> None:
    """Run the job again without delays, and check that each row has an answer."""
    assert cli_of(FAKE)("run", place.folder / "job.yaml", "-q").code == 0
    assert [row["custom_id"] for row in place.table()] == [row["id"] for row in MANY]


@pytest.mark.parametrize(
    ("signum", "code"), first_of([(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], 1)
)
def test_a_run_after_a_signal_computes_nothing_twice(
    signum: signal.Signals, code: int, place: Place, cli_of: CliOf
) -> None:
    long_job(place)
    with started(place, "run", "job.yaml", **SLOW) as process:
        wait_until(lambda: committed(place) >= 8)
        partial = cli_of(NO_ENGINE)(
            "query", place.results, "select count(*) as n from results", "--partial", "--json"
        )
        process.send_signal(signum)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (code, "")
    assert partial.code == 0, partial.err
    print(partial.out)
    assert json.loads(partial.out)["n"] >= 8
    assert "stopping: rows being computed have" in err
    assert "the same command continues" in err
    assert "\r" not in err
    assert "Traceback" not in err
    assert place.published() == {}
    done = committed(place)
    assert 8 <= done < len(MANY)
    continue_to_the_end(place, cli_of)
    first, second = runs(place)
    assert (first["exit_code"], first["computed_requests"]) == (code, done)
    assert (second["reused_requests"], second["computed_requests"]) == (done, len(MANY) - done)


def test_a_run_after_a_kill_of_the_driver_finishes(place: Place, cli_of: CliOf) -> None:
    """`status` reports the crash, and no process survives."""
    long_job(place)
    with started(place, "run", "job.yaml", **SLOW) as process:
        wait_until(lambda: committed(place) >= 4)
        below = list(children(process.pid))
        assert below
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not alive(below))
    done = committed(place)
    assert not (place.folder / "out/res-report/last_run.json").exists()
    told = cli_of(NO_ENGINE)("status", place.results)
    assert (told.code, "crashed; the same command continues where it stopped" in told.out) == (0, True)
    continue_to_the_end(place, cli_of)
    assert runs(place)[-1]["reused_requests"] == done
