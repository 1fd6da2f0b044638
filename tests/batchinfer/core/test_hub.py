"""Tests models given by name: the path in the hub's cache, the error without one, and no network access."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchinfer.bench.options import BenchOptions
from batchinfer.bench.session import workload_of
from batchinfer.core.errors import JobFileError, UsageError
from batchinfer.core.hub import ModelName, describe_model, missing_files, short_name
from batchinfer.job import load_job
from batchinfer.verbs.starter import write_starter
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, people, run, table, write_job
from tests.batchinfer.wrong_jobs import CliOf
from tests.examples import everything, examples
from tests.hub_cache import COMMIT, put_into_cache

OTHER = "f" * 40
ROOT = Path(__file__).parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = (tmp_path / "hub").resolve()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def without_hub() -> dict[str, str]:
    """Return the environment without the variables that locate the cache."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HF_")}


def job_at(folder: Path, model: str) -> Path:
    folder.mkdir(exist_ok=True)
    return write_job(folder, Path("unused"), people(3), model={"path": model})


def refusal(path: Path) -> str:
    with pytest.raises(JobFileError) as raised:
        load_job(path)
    (mistake,) = raised.value.mistakes
    assert mistake.where == "model.path"
    assert mistake.line == 1
    return str(raised.value)


class TestNames:
    @pytest.mark.parametrize(("text", "repo", "revision"), [
        ("org/name", "org/name", "main"),
        ("Qwen/Qwen2.5-0.5B_x@v1.0", "Qwen/Qwen2.5-0.5B_x", "v1.0"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("org/name@refs/pr/4", "org/name", "refs/pr/4"),
    ])  # fmt: skip
    def test_right(self, text: str, repo: str, revision: str) -> None:
        assert ModelName.parse(text) == ModelName(repo, revision)
        assert str(ModelName(repo, revision)) == text

    @pytest.mark.parametrize(
        "text",
        ["name", "", "/", "a/b/c", "org/na--me", "org/..", "a..b/c", "-org/name", "org/näme", "org/x.git", "o g/n",
         "org/name@", "org/name@../../x", "org/name@/x", "org/name@a//b", "org/name@a b", "org/name@-f", "a@b/c@d",
         "org/" + "x" * 97],
    )  # fmt: skip
    def test_wrong(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"org/name|revision"):
            ModelName.parse(text)


class TestLookUp:
    def test_a_revision_is_a_branch_a_tag_or_a_commit(self, tmp_path: Path, cache: Path, model: Path) -> None:
        first = put_into_cache(cache, model)
        second = put_into_cache(cache, model, ref="v2", commit=OTHER)
        named = {"main": first, "v2": second, COMMIT: first, OTHER: second}
        for revision, snapshot in named.items():
            assert load_job(job_at(tmp_path / "job", f"org/tiny@{revision}")).model.path == snapshot
        assert load_job(job_at(tmp_path / "job", "org/tiny")).model.path == first

    def test_a_folder_wins_over_a_name(self, tmp_path: Path, cache: Path, model: Path) -> None:
        put_into_cache(cache, model)
        path = job_at(tmp_path / "job", "org/tiny")
        (path.parent / "org/tiny").mkdir(parents=True)
        assert load_job(path).model.path == path.parent / "org/tiny"

    def test_the_variables_of_hugging_face_say_where(self, tmp_path: Path, model: Path) -> None:
        snapshot = put_into_cache(tmp_path / "home/hub", model)
        path = job_at(tmp_path / "job", "org/tiny")
        code = "import sys; from batchinfer.job import load_job; print(load_job(sys.argv[1]).model.path)"
        command = [sys.executable, "-c", code, str(path)]
        for name, value in (("HF_HUB_CACHE", "home/hub"), ("HF_HOME", "home"))[: examples(1, 2)]:
            env = without_hub() | {name: str(tmp_path / value)}
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
            assert done.stdout.strip() == str(snapshot)


class TestRefusals:
    def test_not_there_names_the_next_step(self, tmp_path: Path, cache: Path, model: Path) -> None:
        put_into_cache(cache, model)
        for name in ("org/other", "org/tiny@v9", f"org/tiny@{OTHER}"):
            text = refusal(job_at(tmp_path / "job", name))
            assert f"no model {name} in the Hugging Face cache {cache}" in text
            assert f"`batchinfer pull {name}`" in text

    def test_the_job_files_other_mistakes_are_listed_too(self, tmp_path: Path, cache: Path) -> None:
        path = job_at(tmp_path / "job", "org/other")
        with pytest.raises(JobFileError) as raised:
            load_job(path, [("sampling.top_p", "2")])
        assert [mistake.where for mistake in raised.value.mistakes] == ["model.path", "--set sampling.top_p"]

    @pytest.mark.parametrize("name", ["org/na--me", "a/b/c@main", "org/tiny@../x", "tiny@main"])
    def test_what_is_no_name_is_said_in_words(self, tmp_path: Path, cache: Path, name: str) -> None:
        text = refusal(job_at(tmp_path / "job", name))
        assert "names no model" in text
        assert "org/name" in text or "a branch, a tag or a commit" in text
        assert "pull" not in text

    @pytest.mark.parametrize("path", ["./org/tiny", "../org/tiny", "/org/tiny", "a/b/c", "tiny"])
    def test_what_can_only_be_a_path_is_no_name(self, tmp_path: Path, cache: Path, path: str) -> None:
        text = refusal(job_at(tmp_path / "job", path))
        assert "does not exist" in text
        assert "pull" not in text

    @pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
    def test_an_incomplete_download(self, tmp_path: Path, cache: Path, model: Path, lost: str) -> None:
        snapshot = put_into_cache(cache, model)
        (snapshot / lost).unlink()
        text = refusal(job_at(tmp_path / "job", "org/tiny"))
        assert "the download of org/tiny is not complete" in text
        assert lost in text
        assert "`batchinfer pull org/tiny`" in text

    def test_shards_that_the_index_names_are_missing(self, tmp_path: Path, cache: Path, model: Path) -> None:
        snapshot = put_into_cache(cache, model)
        (snapshot / "model.safetensors").unlink()
        shards = {f"t{i}": f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        (snapshot / shards["t1"]).write_bytes(b"")
        text = refusal(job_at(tmp_path / "job", "org/tiny"))
        assert "model-00002-of-00003.safetensors and 1 more missing" in text

    def test_other_weights_are_checked_later(self, tmp_path: Path, cache: Path, model: Path) -> None:
        snapshot = put_into_cache(cache, model)
        (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
        assert missing_files(snapshot) == []
        assert load_job(job_at(tmp_path / "job", "org/tiny")).model.path == snapshot


class TestRuns:
    def test_answers_belong_to_a_model_not_a_name(self, tmp_path: Path, cache: Path, model: Path) -> None:
        put_into_cache(cache, model)
        store = {"path": str(tmp_path / "store")}
        for where, named, told in (("a", str(model), str(model)), ("b", "org/tiny", f"org/tiny@{COMMIT}")):
            (tmp_path / where).mkdir()
            path = write_job(tmp_path / where, model, people(6), model={"path": named}, cache=store)
            outcome = run(path) if where == "a" else run(path, NO_ENGINE)
            assert outcome.exit_code == 0
            assert outcome.row["reused_requests"] == (0 if where == "a" else 6)
            assert outcome.row["model"] == told, "the run table says name and commit"
        assert table(tmp_path / "a/job.yaml") == table(tmp_path / "b/job.yaml")

    def test_what_a_folder_is_called(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--org--na-me" / "snapshots" / COMMIT
        assert (describe_model(snapshot), short_name(snapshot)) == (f"org/na-me@{COMMIT}", "org/na-me")
        assert (describe_model(tmp_path), short_name(tmp_path)) == (str(tmp_path), tmp_path.name)


NO_NETWORK = """\
import os, socket
def refuse(name):
    def refused(*arguments, **named):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{name} {arguments[-1]!r}\\n")
        raise OSError("this test allows no network")
    return refused
for name in ("connect", "connect_ex", "sendto"):
    setattr(socket.socket, name, refuse(name))
for name in ("getaddrinfo", "gethostbyname", "create_connection"):
    setattr(socket, name, refuse(name))
"""


def test_no_verb_but_pull_uses_the_network(tmp_path: Path, model: Path) -> None:
    """Uses the real engine: its process and the one that converts a tokenizer inherit the ban."""
    put_into_cache(tmp_path / "home/hub", model)
    path = job_at(tmp_path / "job", "org/tiny")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(NO_NETWORK)
    log = tmp_path / "network.log"
    env = without_hub() | {
        "HF_HOME": str(tmp_path / "home"),
        "NETWORK_LOG": str(log),
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }  # fmt: skip

    def batchinfer(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchinfer", *arguments]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    for verb in ("run", "validate", "preview") if everything() else ("run",):
        done = batchinfer(verb, str(path))
        assert done.returncode == 0, done.stderr
    if everything():
        assert batchinfer("doctor").returncode == 0
        assert batchinfer("run", str(path), "--set", "model.path=org/other").returncode == 78
    assert not log.exists(), log.read_text()
    probe = "import urllib.request as u; u.urlopen('http://127.0.0.1:9/')"
    assert subprocess.run([sys.executable, "-c", probe], env=env, capture_output=True).returncode
    assert log.exists()  # the ban works


class TestOtherVerbs:
    def test_init_names_a_model_of_the_cache(self, tmp_path: Path, cache: Path, model: Path) -> None:
        snapshot = put_into_cache(cache, model)
        starter = write_starter(tmp_path / "new", "org/tiny")
        assert (str(starter.model), starter.ready) == ("org/tiny", True)
        assert load_job(tmp_path / "new" / "job.yaml").model.path == snapshot

    def test_init_says_how_to_pull(self, tmp_path: Path, cache: Path, model: Path, cli_of: CliOf) -> None:
        snapshot = put_into_cache(cache, model)
        (snapshot / "model.safetensors").unlink()  # cut short
        for name in ("org/other@v2", "org/tiny"):
            folder = tmp_path / name.replace("/", "-")
            ended = cli_of(NO_ENGINE)("init", folder, "--model", name)
            assert (ended.code, f"first run: batchinfer pull {name}\n" in ended.out) == (0, True)
            with pytest.raises(JobFileError, match=f"`batchinfer pull {name}`"):
                load_job(folder / "job.yaml")

    def test_init_takes_a_folder_that_is_still_to_be_made(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "models").mkdir()
        assert write_starter(Path("new"), "models/mine").model == Path("models/mine")
        assert '"../models/mine"' in (tmp_path / "new" / "job.yaml").read_text()

    def test_bench_runs_a_model_of_the_cache(self, cache: Path, model: Path) -> None:
        snapshot = put_into_cache(cache, model)
        options = BenchOptions(("decode",), model="org/tiny", rows=2)
        options.check()
        assert options.folder == snapshot
        assert len(workload_of(options, "decode").rows) == 2

    def test_bench_says_how_to_pull_what_is_not_there(self, cache: Path) -> None:
        with pytest.raises(UsageError, match="--model is 'org/other'; it can be tiny, llama-135m") as raised:
            BenchOptions(model="org/other").check()
        assert f"cache {cache} (`batchinfer pull org/other` downloads it)" in str(raised.value)
