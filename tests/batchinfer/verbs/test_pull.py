"""`batchinfer pull` from a local hub: downloads, resumed downloads, refusals and messages."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchinfer import cli
from batchinfer.job import load_job
from batchinfer.models.files.sentence_modules import sentence_modules
from batchinfer.pipeline.options import RunOptions
from tests import warm_commands
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, people, run, table, write_job
from tests.batchinfer.wrong_jobs import hears_signals
from tests.checkpoints import make_tokenizer
from tests.gguf_files import make_gguf, tokenizer_keys
from tests.hub_server import Hub, files_of, serving, sha256
from tests.lora_adapters import make_adapter
from tests.patience import PATIENCE_S, wait_until
from tests.sentence_checkpoints import make_sentence_model, write_dense

ROOT = Path(__file__).parents[3]
FIRST, SECOND, THIRD = "1" * 40, "2" * 40, "3" * 40
WEIGHTS = "model.safetensors"
NEVER = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "README.md": b"# a", "x.gguf": b"GGUF",
         "consolidated.safetensors": b"the same weights again"}  # fmt: skip


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    files = files_of(model) | NEVER
    with serving(Hub("org/tiny", {FIRST: files}, {"main": FIRST, "v1": FIRST})) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return (tmp_path / "home/hub").resolve()


Pull = Callable[..., tuple[int, str, str]]
TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


def command(hub: Hub, cache: Path, *arguments: str, **env: str) -> subprocess.Popen[Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_OFFLINE"))}
    env = kept | {"HF_HOME": str(cache.parent), "HF_ENDPOINT": hub.url} | env
    line = [sys.executable, "-m", "tests.batchinfer.verbs.small_pieces", "pull", *arguments]
    pipe = subprocess.PIPE
    return warm_commands.start(
        line, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears_signals
    )


@pytest.fixture
def pull(hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Pull]:
    """Runs the verb in this process."""
    with pytest.MonkeyPatch.context() as patch:

        def pulled(*arguments: str, of: Hub = hub, **changed: Any) -> tuple[int, str, str]:
            url = changed.pop("ENDPOINT", of.url)
            own = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + TEMPLATE, "HF_HUB_CACHE": str(cache)}
            for name, value in {**own, "HF_HUB_OFFLINE": False, **changed}.items():
                patch.setattr(constants, name, value)
            capsys.readouterr()
            code = cli._guarded(["pull", *arguments])
            return (code, *capsys.readouterr())

        yield pulled


def snapshot(cache: Path, commit: str = FIRST) -> Path:
    return cache / "models--org--tiny" / "snapshots" / commit


def test_a_pulled_model_answers_as_its_folder_does(
    tmp_path: Path, hub: Hub, cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch, pull: Pull
) -> None:
    code, out, err = pull("org/tiny")
    assert code == 0, err
    assert all(text in out for text in (f"org/tiny@{FIRST}", str(snapshot(cache)), "model: {path: org/tiny}"))
    assert {path.name for path in snapshot(cache).iterdir()} == set(files_of(model))
    assert files_of(snapshot(cache)) == files_of(model)
    assert not set(NEVER) & set(hub.served)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    store = {"path": str(tmp_path / "store")}
    for where, named, options in (("a", str(model), ()), ("b", "org/tiny", (NO_ENGINE,))):
        (tmp_path / where).mkdir()
        path = write_job(tmp_path / where, model, people(5), model={"path": named}, cache=store)
        assert run(path, *options).exit_code == 0
    assert table(tmp_path / "a/job.yaml") == table(tmp_path / "b/job.yaml")


def test_modules_of_sentence_models_are_pulled(tmp_path: Path, cache: Path, pull: Pull) -> None:
    make_sentence_model(tmp_path / "vectors", "mean_tokens")
    write_dense(tmp_path / "vectors", (48, 20), ("Tanh",))
    (tmp_path / "vectors/4_Other").mkdir()
    (tmp_path / "vectors/4_Other/config.json").write_text("{}")
    with serving(Hub("org/tiny", {FIRST: files_of(tmp_path / "vectors")}, {"main": FIRST})) as hub:
        code, _, err = pull("org/tiny", of=hub)
    assert code == 0, err
    wanted = files_of(tmp_path / "vectors")
    del wanted["4_Other/config.json"]
    assert files_of(snapshot(cache)) == wanted
    modules = sentence_modules(snapshot(cache))
    assert modules is not None
    assert (modules.pooling, modules.normalizes, modules.prompts["query"]) == ("mean", True, "find: ")
    assert [layer.outputs for layer in modules.dense] == [20]


def test_an_adapter_is_pulled_without_its_model(tmp_path: Path, model: Path, cache: Path, pull: Pull) -> None:
    """A job names it in the same way."""
    source: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    folder = make_adapter(tmp_path / "adapter", source, ["q_proj"])
    (folder / "README.md").write_text("an adapter")
    with serving(Hub("org/tiny", {FIRST: files_of(folder)}, {"main": FIRST})) as hub:
        code, said, err = pull("org/tiny", of=hub)
    assert code == 0, err
    assert "model: {adapters: {tiny: org/tiny}}" in said
    assert {*files_of(snapshot(cache))} == {"adapter_config.json", "adapter_model.safetensors"}
    own = {"path": str(model), "adapters": {"mine": "org/tiny"}, "adapter": "mine"}
    job = write_job(tmp_path, model, [{"text": "a"}], model=own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        assert load_job(job, ()).model.adapters == {"mine": snapshot(cache)}


def test_repeated_pulls_fetch_only_new_files(
    hub: Hub, cache: Path, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second pull fetches nothing. A pulled revision does not change main. Main moves when its commit is complete."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull("org/tiny")[0] == 0
    about_it = {path: token for path, token in hub.tokens.items() if "org/tiny" in path}
    assert set(about_it.values()) == {"Bearer hf_secret"}
    hub.served.clear()
    code, out, _ = pull("org/tiny", "--json")
    facts = json.loads(out)
    assert code == facts["exit_code"] == 0
    assert (facts["commit"], facts["downloaded_bytes"], facts["message"]) == (FIRST, 0, None)
    assert (facts["path"], facts["model"]) == (str(snapshot(cache)), "org/tiny")
    assert {name for name in hub.served if name} == set()

    hub.commits[SECOND] = hub.commits[FIRST]
    hub.refs["next"] = SECOND
    code, out, _ = pull("org/tiny@next")
    assert code == 0
    assert "model: {path: org/tiny@next}" in out
    assert hub.served[WEIGHTS] == 0  # the same content is there already
    refs = cache / "models--org--tiny/refs"
    assert ((refs / "main").read_text(), (refs / "next").read_text()) == (FIRST, SECOND)

    changed = bytearray(hub.commits[FIRST][WEIGHTS])
    changed[-1] ^= 1
    hub.commits[THIRD] = hub.commits[FIRST] | {WEIGHTS: bytes(changed)}
    hub.refs["main"] = THIRD
    hub.damaged.add(WEIGHTS)
    code, _, err = pull("org/tiny")
    assert (code, "arrived damaged" in err) == (69, True)
    assert (refs / "main").read_text() == FIRST
    hub.damaged.clear()
    assert pull("org/tiny")[0] == 0
    assert (refs / "main").read_text() == THIRD
    assert (snapshot(cache, THIRD) / WEIGHTS).read_bytes() == bytes(changed)


def test_a_pull_that_was_interrupted_continues_in_the_middle_of_a_file(
    hub: Hub, cache: Path, pull: Pull
) -> None:
    whole = len(hub.commits[FIRST][WEIGHTS])
    hub.breaks[WEIGHTS] = whole // 2
    hub.stalled.set()
    child = command(hub, cache, "org/tiny")
    assert hub.reached.wait(PATIENCE_S)
    partial = cache / f"models--org--tiny/blobs/{sha256(hub.commits[FIRST][WEIGHTS])}.incomplete"
    arrived = whole // 2 - 3 * 4096  # the client buffers three blocks
    wait_until(lambda: child.poll() is not None or (partial.exists() and partial.stat().st_size >= arrived))
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=5)  # the hub is silent, and its connection's timeout is 10 s
    assert child.returncode == 130
    assert "the same command continues" in err
    there = partial.stat().st_size
    assert 0 < there < whole
    hub.stalled.clear()
    hub.breaks.clear()
    hub.served.clear()
    code, out, err = pull("org/tiny", "--json")
    assert code == 0, err
    assert hub.served[WEIGHTS] == whole - there == json.loads(out)["downloaded_bytes"]
    assert (snapshot(cache) / WEIGHTS).read_bytes() == hub.commits[FIRST][WEIGHTS]
    assert not partial.exists()


def test_shards_are_those_that_the_index_names(tmp_path: Path, model: Path, cache: Path, pull: Pull) -> None:
    from safetensors.numpy import load_file, save

    tensors = load_file(model / WEIGHTS)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    weight_map = {name: shard for shard, its in shards.items() for name in its}
    files = {name: data for name, data in files_of(model).items() if name != WEIGHTS} | NEVER
    files |= {shard: save({name: tensors[name] for name in its}) for shard, its in shards.items()}
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    with serving(Hub("org/tiny", {FIRST: files}, {"main": FIRST})) as hub:
        code, _, err = pull("org/tiny", of=hub)
    assert code == 0, err
    assert {path.name for path in snapshot(cache).iterdir()} == set(files) - set(NEVER)


@pytest.mark.parametrize(("status", "error", "code", "words"), [
    (403, "GatedRepo", 69, ("gated", "HF_TOKEN")),
    (404, "RepoNotFound", 66, ("no model org/tiny", "HF_TOKEN")),
    (403, "", 69, ("does not let you read", "HF_TOKEN")),
    (501, "", 69, ("answered 501", "the same command continues")),
])  # fmt: skip
def test_a_refusal_of_the_hub_is_reported_with_a_remedy(
    hub: Hub, status: int, error: str, code: int, words: tuple[str, ...], pull: Pull
) -> None:
    hub.error = (status, error)
    found, out, err = pull("org/tiny")
    assert (found, out) == (code, "")
    assert all(word in err for word in words), err
    assert "Traceback" not in err


def test_wrong_names_revisions_and_endpoints(cache: Path, pull: Pull) -> None:
    code, _, err = pull("org/tiny@v9")
    assert (code, "no branch, tag or commit v9" in err) == (66, True), err
    code, _, err = pull("tiny")
    assert (code, "org/name" in err) == (2, True), err
    code, _, err = pull("org/tiny", ENDPOINT="http://127.0.0.1:9")
    assert (code, "cannot be reached" in err) == (69, True), err
    code, _, err = pull("org/tiny", HF_HUB_OFFLINE=True)
    assert (code, "HF_HUB_OFFLINE" in err) == (69, True), err
    assert not cache.exists()


def test_pickle_is_refused_before_anything_is_fetched(hub: Hub, pull: Pull) -> None:
    files = hub.commits[FIRST]
    for name in (WEIGHTS, "consolidated.safetensors"):
        del files[name]
    code, _, err = pull("org/tiny")
    assert (code, "pickle" in err) == (77, True), err
    assert {name for name in hub.served if name} == set()


def gguf_hub(folder: Path, name: str) -> dict[str, bytes]:
    """Return the files of a repository with a model in GGUF, whole or in parts, and other files."""
    keys = tokenizer_keys(make_tokenizer(folder / "plain"))
    shards = 2 if "parts" in name else 1
    make_gguf(folder / f"{name}.gguf", folder / "plain", "llama", metadata=keys, shards=shards)
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.gguf"))}


@pytest.mark.sample(1)
@pytest.mark.parametrize("config", [True, False])
def test_one_gguf_model_of_a_dozen_is_pulled(
    hub: Hub, cache: Path, tmp_path: Path, config: bool, monkeypatch: pytest.MonkeyPatch, pull: Pull
) -> None:
    """The repository also has a config.json, as many do."""
    hub.commits[FIRST] = {
        **gguf_hub(tmp_path, "tiny-Q4_K_M"), "tiny-Q8_0.gguf": b"GGUF", "mmproj-tiny.gguf": b"GGUF",
        "README.md": b"# a", **({"config.json": b"{}"} if config else {}),
    }  # fmt: skip
    code, _, err = pull("org/tiny")
    assert code == 66, err
    assert (
        "has several models in GGUF: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf; choose one, such as --include" in err
    )
    code, _, err = pull("org/tiny", "--include", "*Q5*")
    assert (code, "no GGUF file of org/tiny matches *Q5*; tiny-Q4_K_M.gguf" in err) == (66, True), err
    code, out, err = pull("org/tiny", "--include", "*Q4_K_M*")
    assert (code, "model: {path: org/tiny}" in out) == (0, True), err
    assert hub.served["tiny-Q8_0.gguf"] == 0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    job = write_job(tmp_path, Path("org/tiny"), people(2))
    assert run(job, RunOptions()).row["rows_ok"] == 2
    hub.commits[FIRST]["tiny-Q8_0.gguf"] = hub.commits[FIRST]["tiny-Q4_K_M.gguf"]
    code, out, err = pull("org/tiny", "--include", "*Q8_0*")
    assert (code, f"{{path: {snapshot(cache)}/tiny-Q8_0.gguf}}" in out) == (0, True), err


def test_all_parts_of_a_gguf_model_are_pulled(hub: Hub, cache: Path, tmp_path: Path, pull: Pull) -> None:
    """The repository also has unneeded safetensors."""
    hub.commits[FIRST] |= gguf_hub(tmp_path, "parts")
    code, out, err = pull("org/tiny", "--include", "*00002-of-00002*", "--json")
    assert (code, json.loads(out)["message"]) == (0, None), err
    assert {file.name for file in snapshot(cache).glob("*.gguf")} == {
        f"parts-0000{n}-of-00002.gguf" for n in (1, 2)
    }
    assert hub.served[WEIGHTS] == 0
    del hub.commits[FIRST]["parts-00001-of-00002.gguf"]
    code, _, err = pull("org/tiny", "--include", "*.gguf")
    assert (code, "parts-00001-of-00002.gguf, another part of that model, is missing" in err) == (
        66,
        False,
    ), err


def test_a_model_that_cannot_be_run_is_called_so(hub: Hub, cache: Path, pull: Pull) -> None:
    config = json.loads(hub.commits[FIRST]["config.json"])
    hub.commits[FIRST]["config.json"] = json.dumps(config | {"num_hidden_layers": 77}).encode()
    code, out, err = pull("org/tiny")
    assert code == 78
    assert str(snapshot(cache)) in out
    assert "model: {path" not in out
    assert "cannot be run" in err
    assert "missing tensors" in err


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk_is_reported_before_weights_are_fetched(
    hub: Hub, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: used(path)._replace(free=1000))  # type: ignore[call-arg]
    code, _, err = pull("org/tiny")
    assert (code, "HF_HUB_CACHE" in err) == (74, True), err
    assert hub.served[WEIGHTS] == 0
