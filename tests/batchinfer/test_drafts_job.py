"""Runs whole jobs with and without drafts: equal rows, fewer steps."""

from __future__ import annotations

import functools
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchinfer.core.errors import BatchInferError, JobFileError
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.plans import earlier_drafts
from batchinfer.pipeline.plans.earlier_drafts import with_draft
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.stages import drafting
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.replica_pool import ReplicaPool
from batchinfer.report.progress import Progress
from tests.batchinfer.costed_engine import COSTED, known_peaks
from tests.batchinfer.eagle_heads import SIZES, EagleReference, save_eagle
from tests.batchinfer.medusa_heads import heads_of, save_heads
from tests.batchinfer.mtp_layers import add_mtp, start_of
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, no_engine, run, table, write_job
from tests.batchinfer.plan.forecast.forecasts import planned, text
from tests.checkpoints import edit_json
from tests.examples import first_of
from tests.lora_adapters import make_adapter

REAL = RunOptions(waves_from_s=float("inf"), engine=COSTED)
FLOAT32 = ("model.dtype", "float32")
WEIGHTS = "model.safetensors"
QUICKSTART = Path(__file__).parents[2] / "jobs" / "quickstart"
SOURCES: tuple[Any, ...] = (["prompt"], ["answers"], "auto")
EVERY = ["earlier", "answers", "prompt"]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["order", "question"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["kind", "note"],
}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": {"max_tokens": 40}},
    "sampled": {"sampling": {"max_tokens": 40, "temperature": 0.4, "top_p": 0.9, "seed": 3}},
    "penalised": {"sampling": {"max_tokens": 40, "repetition_penalty": 1.05, "min_tokens": 30}},
    "logprobs": {"sampling": {"max_tokens": 30, "logprobs": 2, "stop": ["ee"]}},
    "schema": {"sampling": {"max_tokens": 60}, "output": {"schema": SCHEMA}, "on_error": {"max_error_rate": 1}},
    "deterministic": {"sampling": {"max_tokens": 40}, "engine": {"deterministic": True}},
    "replicas": {"sampling": {"max_tokens": 40}, "engine": {"data_parallel": 2, "threads": 2}},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with known_peaks(tmp_path_factory.mktemp("cache")):
        yield


def rows(count: int = 12) -> list[dict[str, Any]]:
    return [{"text": f"row {at % 7} has some words, and row {at % 5} has some words"} for at in range(count)]


def job(folder: Path, model: Path, drafts: Any, **sections: Any) -> Path:
    folder.mkdir()
    plain = {"prompt": {"text": "text", "system": None, "user": None}}
    output = {"path": "out/res", **sections.pop("output", {})}
    engine = {"max_num_seqs": 4, **sections.pop("engine", {})}
    return write_job(
        folder, model, rows(), output=output, engine=engine, drafts=drafts, **{**plain, **sections}
    )


class Plain(NamedTuple):
    """The published rows of a job without drafts, and its report row."""

    table: list[dict[str, Any]]
    row: dict[str, Any]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, warm_children: None) -> Callable[[Path, str], Plain]:
    """Return a function that runs a job without drafts, once per model and kind."""

    @functools.cache
    def found(model: Path, kind: str) -> Plain:
        path = job(tmp_path_factory.mktemp("off") / "job", model, "off", **WITH_MODELS[kind])
        outcome = run(path, REAL, *dtype_of(kind))
        assert outcome.exit_code == 0, kind
        return Plain(table(path), outcome.row)

    return found


def dtype_of(kind: str) -> tuple[tuple[str, str], ...]:
    return () if kind == "deterministic" else (FLOAT32,)


@pytest.mark.parametrize(
    ("kind", "drafts"),
    first_of(
        [
            ("greedy", EVERY),
            *(("greedy", drafts) for drafts in SOURCES),
            *((kind, drafts) for kind in JOBS if kind != "greedy" for drafts in ("auto", EVERY)),
        ],
        1,
    ),
)
def test_drafts_do_not_change_the_rows_of_a_job(
    tmp_path: Path, model: Path, without: Callable[[Path, str], Plain], kind: str, drafts: Any
) -> None:
    """Answers of a small random model soon repeat themselves and each other: drafts are right."""
    wanted = without(model, kind)
    assert (wanted.row["drafted_tokens"], wanted.row["drafts_saved_s"]) == (0, 0)
    path = job(tmp_path / "job", model, drafts, **JOBS[kind])
    got = run(path, REAL, *dtype_of(kind))
    assert (got.exit_code, table(path)) == (0, wanted.table)
    row = got.row
    names = ("prompt", "answers") if drafts == "auto" else drafts
    other = {*EVERY} - {*names}
    assert sum(row[f"{name}_drafted"] for name in names) == row["drafted_tokens"]
    assert sum(row[f"{name}_drafted"] for name in other) == 0
    assert row["accepted_tokens"] <= row["drafted_tokens"]
    assert row["sampled_tokens"] == wanted.row["sampled_tokens"]
    if kind != "replicas":  # which divide the rows as they get to it
        assert row["steps"] <= wanted.row["steps"]
    if kind == "greedy":
        assert row["drafted_tokens"] > 0


def changed(path: Path, rows: list[dict[str, Any]], **sections: Any) -> None:
    """Replace the rows and sections of a job."""
    said = json.loads(path.read_text())
    (path.parent / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    path.write_text(json.dumps(said | {name: said.get(name, {}) | one for name, one in sections.items()}))


class Seen:
    """A draft source that records its drafts."""

    def __init__(self) -> None:
        self.given: list[Sequence[int] | None] = []

    def __call__(self, request: Request, tokens: Sequence[int] | None, vocab: int) -> Request:
        self.given.append(tokens)
        return with_draft(request, tokens, vocab)


@pytest.mark.sample(1)
@pytest.mark.parametrize("waves", [False, True])
def test_rows_whose_job_changed_are_drafted_by_their_last_answers(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, waves: bool
) -> None:
    """Rows are found by their ids at other positions."""
    monkeypatch.setattr(earlier_drafts, "with_draft", seen := Seen())
    options = replace(REAL, waves_from_s=0.0) if waves else REAL
    given = {
        "input": {"path": "in.jsonl", "id": "id"},
        "sampling": {"max_tokens": 36, "from_columns": {"temperature": "t"}},
    }
    path, off = (
        job(tmp_path / name, model, drafts, **given) for name, drafts in (("a", ["earlier"]), ("b", "off"))
    )
    named = [{"id": f"r{at}", **row, "t": 1.0 if at == 3 else 0.0} for at, row in enumerate(rows())]
    changed(path, named)
    assert run(path, options, FLOAT32, ("sampling.max_tokens", "30")).row["drafted_tokens"] == 0
    new, other = ({"id": name, "text": f"{name} row", "t": 0.0} for name in ("new", "another"))
    for one in (path, off):
        changed(one, [new, *reversed(named), other])
    got, wanted = (run(one, options, FLOAT32) for one in (path, off))
    assert table(path) == table(off)
    assert 0 < got.row["earlier_accepted"] == got.row["accepted_tokens"]
    assert sum(tokens is not None for tokens in seen.given) == len(named) - 1, (
        "each row has its id's answer, except for a sampled one"
    )
    assert got.row["steps"] < wanted.row["steps"]


def test_engines_begin_with_the_last_answers_of_the_last_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quickstart's model writes texts that tokenise to their own tokens."""
    orders = [json.loads(line) for line in (QUICKSTART / "data/orders.jsonl").read_bytes().splitlines()[:3]]
    prompt = YAML(typ="safe").load(QUICKSTART / "job.yaml")["prompt"]
    path = job(tmp_path / "a", QUICKSTART / "model", "auto", prompt=prompt, sampling={"max_tokens": 48})
    told: list[list[str]] = []
    decoded = Tokenizer.load(QUICKSTART / "model").decode_batch
    monkeypatch.setattr(ReplicaPool, "learn", lambda _, answers: told.append(decoded(answers)))
    changed(path, orders[:2])
    run(path, REAL, FLOAT32)
    before = [row["generated_text"] for row in table(path)]
    changed(path, orders[2:])
    run(path, REAL, FLOAT32)
    assert told == [[], before]
    run(path, REAL, FLOAT32, ("drafts", "[answers]"), ("sampling.max_tokens", "47"))
    assert told[2:] == [[]], "a job that takes nothing from its last result"


@pytest.mark.slow
def test_rows_with_several_answers_have_no_earlier_ones(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_drafts, "with_draft", seen := Seen())
    sampling = {"max_tokens": 10, "n": 2, "temperature": 1.0}
    path = job(tmp_path / "job", model, ["earlier"], sampling=sampling)
    run(path, REAL, FLOAT32)
    assert run(path, REAL, FLOAT32, ("sampling.max_tokens", "12")).row["drafted_tokens"] == 0
    assert {*seen.given} <= {None}


def deep(model: Path, folder: Path) -> Path:
    """Make a model with eight times the layers, whose additional layers change few answers."""
    copied = Path(shutil.copytree(model, folder))
    config, weights = json.loads((copied / "config.json").read_text()), load_file(copied / WEIGHTS)
    own = config["num_hidden_layers"]
    for name, values in [*weights.items()]:
        if name.startswith("model.layers.0."):
            little = 0.002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            for further in range(own, 8 * own):
                weights[name.replace(".0.", f".{further}.", 1)] = (values * little).clone()
    edit_json(copied / "config.json", num_hidden_layers=8 * own)
    save_file(weights, copied / WEIGHTS, {"format": "pt"})
    return copied


def windowed(model: Path, folder: Path) -> Path:
    """Copy a model and give each layer a window."""
    copied = Path(shutil.copytree(model, folder))
    architecture = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    edit_json(copied / "config.json", **architecture, sliding_window=16)
    return copied


@pytest.fixture(scope="module")
def large(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a larger model whose first layers are `model`."""
    return deep(model, tmp_path_factory.mktemp("deep") / "large")


WITH_MODELS = {
    **JOBS,
    "several": {"sampling": {"max_tokens": 30, "n": 2, "temperature": 0.4}},
    "cool": {"sampling": {"max_tokens": 30, "n": 2, "temperature": 0.1}},
    "ladder": {
        "sampling": {"max_tokens": 12, "min_tokens": 12},
        "on_invalid": [{"max_tokens": 20, "min_tokens": 20}, {"max_tokens": 26}],
    },
}


@pytest.mark.parametrize(
    ("kind", "runs"),
    first_of(
        [
            ("greedy", "beside"),
            *((kind, "beside") for kind in WITH_MODELS if kind not in ("greedy", "cool")),
            *((kind, "first") for kind in ("greedy", "sampled", "schema", "ladder", "replicas")),
        ],
        1,
    ),
)
def test_a_draft_model_changes_no_row(
    tmp_path: Path, model: Path, large: Path, without: Callable[[Path, str], Plain], kind: str, runs: str
) -> None:
    wanted = without(large, kind)
    path = job(tmp_path / "model", large, {"model": str(model), "runs": runs}, **WITH_MODELS[kind])
    got = run(path, REAL, *dtype_of(kind))
    assert (got.exit_code, table(path)) == (0, wanted.table)
    row = got.row
    assert row["draft_model_runs"] == runs
    assert not row["worker_restarts"]
    # Timing decides which rows run together, and which are answered as duplicates
    if kind not in ("replicas", "ladder"):
        assert row["sampled_tokens"] == wanted.row["sampled_tokens"]
    assert row["model_accepted"] > (0.7 if runs == "beside" else 0.5) * row["model_drafted"]
    assert row["steps"] < (0.5 if runs == "beside" else 0.8) * wanted.row["steps"]
    if runs == "first":
        assert 0 < row["draft_model_s"] < row["wall_s"]
    else:
        assert row["draft_model_s"] is None
        assert 0 < row["proposing_s"] < row["wall_s"]


@pytest.mark.slow
@pytest.mark.parametrize("runs", ["first", "beside", "heads"])
def test_rows_with_adapters_have_drafts_by_a_model_without(
    tmp_path: Path, model: Path, large: Path, runs: str
) -> None:
    source: PreTrainedModel = AutoModelForCausalLM.from_pretrained(large)
    for seed, name in enumerate(("one", "two")):
        make_adapter(tmp_path / name, source, ("q_proj", "down_proj"), seed=seed)
    own = {"adapters": {name: str(tmp_path / name) for name in ("one", "two")}, "adapter_from_column": "who"}
    given = [row | {"who": (None, "one", "two")[at % 3]} for at, row in enumerate(rows(15))]
    paths = [tmp_path / "a", tmp_path / "b"]
    asked = {"model": str(model), "runs": runs}
    if runs == "heads":
        asked = {"heads": str(echoing(large, tmp_path / "eagle"))}
    for at, drafts in enumerate(("off", asked)):
        paths[at] = job(paths[at], large, drafts, sampling={"max_tokens": 24})
        changed(paths[at], given, model=own)
    plain, got = (run(path, REAL, FLOAT32) for path in paths)
    assert table(paths[0]) == table(paths[1])
    assert plain.row["drafted_tokens"] == 0 < got.row["model_accepted"] + got.row["heads_accepted"]


def asked_first(path: Path, options: RunOptions = REAL) -> int:
    """Run a job and return the number of requests that its draft model answered first."""
    said: list[str] = []
    run_job(
        load_job(path, [FLOAT32]), options, Progress(io.StringIO(), quiet=True), Interrupts(), said.append
    )
    (line,) = (line for line in said if line.endswith("requests first"))
    assert not any(line.startswith("the whole run") for line in said), "the draft model's time is not in it"
    return int(line.split(" answers ")[1].split()[0])


def test_a_killed_draft_model_resumes(
    tmp_path: Path, model: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine has answered some rows, and the job's engine has not started."""
    path = job(tmp_path / "job", large, {"model": str(model), "runs": "first"}, sampling={"max_tokens": 12})
    changed(path, [{"text": f"row {at} has some words"} for at in range(24)])
    monkeypatch.setenv("DIES_AFTER", "9")
    monkeypatch.setenv("DIED", str(tmp_path / "died"))
    with pytest.raises(BatchInferError):
        asked_first(path, replace(REAL, engine="tests.batchinfer.dying_engine:build"))
    assert not (path.parent / "out/res").exists()
    known = len(stored(path.parent / "out/.batchinfer-res/completions"))
    assert 4 <= known < 24
    assert asked_first(path) == 24 - known
    assert {row["status"] for row in table(path)} == {"ok"}


def test_equal_requests_to_a_draft_model_are_computed_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows differ in reported log-probabilities, or are too long for the draft model. Its answers are stored
    like its own job's, which computes nothing more."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    edit_json(other / "config.json", max_position_embeddings=64)
    texts, shared = ("one", "two", "word " * 80), {"path": str(tmp_path / "store")}
    sections = {"sampling": {"max_tokens": 20, "from_columns": {"logprobs": "lp"}}, "cache": shared}
    drafts = {"model": str(other), "runs": "first", "quantization": "int4"}
    path = job(tmp_path / "job", model, drafts, **sections)
    changed(path, [{"text": text, "lp": lp} for text in texts for lp in (1, 2)])
    row = run(path, REAL, FLOAT32).row
    assert (row["exit_code"], row["quantization"]) == (0, "none"), "the quantisation of the job's own model"
    assert row["draft_model_s"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(drafting, "engines", no_engine)
        assert run(path, REAL, FLOAT32, ("model.kv_cache_dtype", "int8")).row["draft_model_s"] > 0
    own = job(tmp_path / "own", other, "off", sampling={"max_tokens": 20}, cache=shared)
    changed(own, [{"text": text} for text in texts[:2]])
    int4 = ("model.quantization", "int4"), ("model.calibration", "off")
    assert run(own, NO_ENGINE, FLOAT32, *int4).row["reused_requests"] == 2


def test_drafts_end_before_tokens_that_the_model_has_not() -> None:
    request = Request(bytes(32), np.zeros(1, np.int32), SamplingParams(max_tokens=4))
    for tokens, expected in (([1, 2, 300, 4], [1, 2]), ([300], None), ([1, 2, 3, 4, 5], [1, 2, 3, 4])):
        draft = with_draft(request, tokens, 300).draft
        assert (None if draft is None else draft.tolist()) == expected


def stored(store: Path) -> list[Any]:
    return duckdb.sql(f"SELECT DISTINCT key FROM read_parquet('{store}/part-*.parquet')").fetchall()


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path, model: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    said = json.loads((other / "tokenizer.json").read_text())
    said["added_tokens"][-1]["content"] = "<|another|>"
    (other / "tokenizer.json").write_text(json.dumps(said))
    with pytest.raises(JobFileError, match=r"drafts\.model: .* has other tokens than the job's model"):
        run(job(tmp_path / "job", model, {"model": str(other)}), REAL)
    with pytest.raises(JobFileError, match=r"drafts\.model: "):
        run(job(tmp_path / "gone", model, {"model": str(tmp_path / "nowhere")}), REAL)


@pytest.mark.parametrize(("sections", "reason"), [
    ({"engine": {"tensor_parallel_size": 2, "threads": 2}}, "sharded among ranks"),
    ({}, "every layer of the job's model has a window"),
])  # fmt: skip
def test_a_draft_model_that_cannot_run_in_the_engine_answers_first(
    tmp_path: Path, model: Path, sections: dict[str, Any], reason: str
) -> None:
    if not sections:
        model = windowed(model, tmp_path / "windowed")
    drafts = {"model": str(model), "runs": "beside"}
    with pytest.raises(
        JobFileError, match=rf"drafts\.runs: beside: .*{reason}.*; use first, or leave it out"
    ):
        run(job(tmp_path / "beside", model, drafts, **sections), REAL, FLOAT32)
    path = job(tmp_path / "auto", model, {"model": str(model)}, sampling={"max_tokens": 8}, **sections)
    found = planned(path, FLOAT32)
    assert found.draft_model is not None
    assert found.draft_model["runs"] == "first"
    assert reason in found.draft_model["why"]


def test_forecasts_use_the_acceptance_of_the_last_run(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path / "job", model, "auto", sampling={"max_tokens": 20})
    ran = run(path, REAL, FLOAT32).row
    longer = ("sampling.max_tokens", "22")
    forecast = planned(path, FLOAT32, longer)
    found = forecast.forecast
    assert found is not None
    assert found.proposals is not None
    told = (found.proposals.drafted, found.proposals.accepted, found.proposals.saved_s)
    assert told == (ran["drafted_tokens"], ran["accepted_tokens"], ran["drafts_saved_s"])
    assert "proposed tokens were right in the last run" in text(forecast)
    again = run(path, REAL, FLOAT32, ("drafts", "off"))
    assert not again.row["steps"], "no answer is computed again because drafts are off now"
    off = planned(path, FLOAT32, longer, ("drafts", "off"), ("sampling.seed", "1")).forecast
    assert off is None or off.proposals is None


@pytest.mark.parametrize(("sections", "message"), [
    ({"drafts": "some"}, "auto, off, a list of any of prompt, answers, earlier, or a section"),
    ({"drafts": ["prompt", "lookahead"]}, "drafts: lookahead was removed; use prompt, answers or earlier"),
    ({"drafts": ["prompt", "oracle"]}, "auto, off, a list"),
    ({"drafts": []}, "auto, off, a list"),
    ({"drafts": {"modl": "small"}}, 'the section drafts has no key "modl" .did you mean model'),
    ({"drafts": {"model": "small", "quantization": "int3"}}, 'found the text "int3"; it must be one of auto'),
    ({"drafts": {"model": "small", "runs": "after"}}, 'found the text "after"; it must be one of auto, first'),
    ({"drafts": {"runs": "first"}}, "names neither a model nor heads"),
    ({"drafts": {"model": "small", "heads": "heads"}}, "names a model and heads"),
    ({"drafts": {"heads": "heads", "runs": "first"}}, r"drafts\.runs: is for drafts\.model, not for heads"),
    ({"drafts": {"model": "small"}, "task": "embed"}, "no answers are generated"),
    ({"drafts": ["prompt", "prompt"]}, "names a source twice"),
    ({"drafts": ["prompt"], "task": "embed"}, "no answers are generated"),
])  # fmt: skip
def test_invalid_values_of_drafts_are_refused(
    tmp_path: Path, model: Path, sections: dict[str, Any], message: str
) -> None:
    path = write_job(tmp_path, model, rows(2), **sections)
    with pytest.raises((BatchInferError, JobFileError), match=message):
        load_job(path)


@pytest.mark.parametrize(
    ("kind", "heads"),
    first_of(
        [
            ("greedy", "eagle"),
            ("greedy", "trees"),
            *((kind, "medusa") for kind in ("penalised", "greedy", "schema", "replicas")),
            *((kind, "eagle") for kind in ("cool", *JOBS) if kind not in ("greedy", "sampled")),
            *((kind, "trees") for kind in ("sampled", "penalised", "schema", "several")),
        ],
        2,
    ),
)
def test_heads_change_no_row(
    tmp_path: Path, model: Path, large: Path, without: Callable[[Path, str], Plain], kind: str, heads: str
) -> None:
    """Heads propose the last token again: a small random model's answers repeat. In trees only second
    candidates are right, and chains are wrong."""
    base = model if heads == "trees" else large
    folder = {"medusa": repeating, "eagle": echoing, "trees": second}[heads](base, tmp_path / "heads")
    path = job(tmp_path / "job", base, {"heads": str(folder)}, **WITH_MODELS[kind])
    got, wanted = run(path, REAL, *dtype_of(kind)), without(base, kind)
    assert (got.exit_code, table(path)) == (0, wanted.table)
    assert got.row["heads_drafted"] > got.row["heads_accepted"]
    if kind != "replicas":
        assert got.row["sampled_tokens"] == wanted.row["sampled_tokens"]
    if kind not in ("schema", "replicas"):  # too few rows may be left to find a useful draft
        assert got.row["heads_accepted"] > 0
        assert got.row["proposing_s"] > 0
        assert got.row["steps"] < wanted.row["steps"]


def echoing(model: Path, folder: Path) -> Path:
    """Make an EAGLE-3 head that proposes the most likely token for the last layer's input."""
    weights, config = load_file(model / WEIGHTS), json.loads((model / "config.json").read_text())
    out = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    vocab, hidden = out.shape
    head = EagleReference(hidden, vocab, vocab)
    with torch.no_grad():
        for one in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj, head.fc):
            one.weight.zero_()
        head.fc.weight[:, 2 * hidden :].copy_(torch.eye(hidden))
        head.norm.weight.copy_(weights["model.norm.weight"])
        head.lm_head.weight.copy_(out)
    return save_eagle(folder, head, vocab, rms_norm_eps=config["rms_norm_eps"])


def repeating(model: Path, folder: Path, hidden: int = 0) -> Path:
    """Make two heads that propose the model's own next token, or heads of another width."""
    weights = load_file(model / WEIGHTS)
    out = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    heads = heads_of(hidden or out.shape[1], out.shape[0], 2, 1)
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter.zero_()
            if not hidden:
                head[-1].weight.copy_(out)
    return save_heads(folder, heads, 1)


def second(model: Path, folder: Path) -> Path:
    """Make heads whose second candidate is right in some steps. The first candidate never occurs.

    The second one is the model's own, computed without one value of the state.
    """
    weights = load_file(model / WEIGHTS)
    out = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).float()
    axis = int(out.var(0).argmin())
    own = out.clone()
    own[:, axis] = 0
    own[NEVER] = 0
    own[NEVER, axis] = 1.0
    heads = heads_of(out.shape[1], out.shape[0], 2, 1)
    with torch.no_grad():
        for head in heads:
            for parameter in head.parameters():
                parameter.zero_()
            head[0].linear.bias[axis] = 1000.0  # which is added to the state
            head[-1].weight.copy_(own)
    return save_heads(folder, heads, 1)


NEVER = 5  # a token


def test_heads_count_as_weights_and_heads_with_a_layer_also_as_cache(
    tmp_path: Path, model: Path, large: Path
) -> None:
    """A layer caches K and V of each token, and the state that it reads."""
    folders = {"medusa": repeating(large, tmp_path / "medusa"), "eagle": echoing(large, tmp_path / "eagle")}
    plain = planned(job(tmp_path / "plain", large, "off"), FLOAT32).memory
    assert plain is not None
    for name, file in (("medusa", "medusa_lm_head.safetensors"), ("eagle", WEIGHTS)):
        drafts = {"heads": str(folders[name])}
        found = planned(job(tmp_path / f"job-{name}", large, drafts), FLOAT32).memory
        assert found is not None
        tensors = load_file(folders[name] / file).values()
        values = sum(one.numel() for one in tensors if one.is_floating_point())
        assert found.weights == plain.weights + 4 * values
        tokens = found.blocks * found.block_size
        assert tokens == plain.blocks * plain.block_size
        layer = 2 * SIZES["num_key_value_heads"] * 12 + SIZES["hidden_size"] if name == "eagle" else 0
        assert found.kv_cache == plain.kv_cache + 4 * tokens * layer


def test_heads_that_do_not_fit_are_refused_before_anything_runs(
    tmp_path: Path, model: Path, large: Path
) -> None:
    wide, eagle = repeating(model, tmp_path / "wide", 52), echoing(large, tmp_path / "eagle")
    ranks = {"tensor_parallel_size": 2, "threads": 2}
    for at, (base, heads, engine, reason) in enumerate((
        (model, wide, {}, ".*is of shape .52, 52., and the model's heads are of"),
        (large, eagle, ranks, "draft heads do not work with a model that is sharded among ranks"),
        (windowed(large, tmp_path / "windowed"), eagle, {}, "every layer of the job's model has a window"),
    )):  # fmt: skip
        with pytest.raises(JobFileError, match=rf"drafts\.heads: {reason}") as refused:
            run(job(tmp_path / f"{at}", base, {"heads": str(heads)}, engine=engine), REAL)
        assert refused.value.exit_code == 78


def test_an_mtp_layer_changes_no_row(tmp_path: Path, model: Path) -> None:
    """The layer is in the model's folder. It gives the next token if nothing else matters, which is nearly
    always the case."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    add_mtp(folder, 12, vocab=json.loads((model / "config.json").read_text())["vocab_size"])
    save_file(by_last_token(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    plain, path = (
        job(tmp_path / name, folder, drafts, sampling={"max_tokens": 20})
        for name, drafts in (("off", "off"), ("job", {"heads": str(folder)}))
    )
    for one in (plain, path):
        changed(one, rows(4))
    wanted, got = (run(one, REAL, FLOAT32).row for one in (plain, path))
    assert (got["exit_code"], table(path)) == (0, table(plain))
    assert got["sampled_tokens"] == wanted["sampled_tokens"]
    assert got["heads_accepted"] > 0.6 * got["heads_drafted"] > 0
    assert got["steps"] < 0.6 * wanted["steps"]


def by_last_token(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make a model whose layers change little, with an MTP layer that returns the embedding."""
    hidden, start = len(weights["model.norm.weight"]), start_of(12)
    for name, one in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one.mul_(0.0 if name.startswith(start) else 0.001)
    fuse = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    further = {
        "eh_proj": fuse,
        "enorm": torch.ones(hidden),
        "shared_head.norm": weights["model.norm.weight"].clone(),
    }
    return weights | {f"{start}{name}.weight": one for name, one in further.items()}
