"""Runs whole jobs whose rows use different adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from batchinfer.core.errors import BatchInferError
from batchinfer.job import load_job
from batchinfer.models.adapters.channel_factors import FILE
from batchinfer.models.adapters.sizes import adapter_sizes
from batchinfer.models.adapters.stored_adapter import inspect_adapter
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table, write_job
from tests.batchinfer.plan.forecast.forecasts import planned
from tests.checkpoints import make_model_folder
from tests.lora_adapters import make_adapter, merged

REAL = RunOptions(waves_from_s=float("inf"))
ENDS = ("q_proj", "v_proj", "up_proj", "down_proj")
PLAIN = {"prompt": {"text": "text", "system": None, "user": None}, "sampling": {"max_tokens": 6}}
FLOAT32 = ("model.dtype", "float32")


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters and the merged models: `one` and `two`, `merged-one` and `merged-two`."""
    folder = tmp_path_factory.mktemp("adapters")
    source: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model)
    for seed, name in enumerate(("one", "two")):
        make_adapter(folder / name, source, ENDS, seed=seed)
        shutil.copytree(model, folder / f"merged-{name}")
        merged(source, folder / name).save_pretrained(folder / f"merged-{name}")
    AutoTokenizer.from_pretrained(folder / "merged-one")  # it is whole
    return folder


def job(folder: Path, base: Path, adapters: Path, rows: list[Any] | None, **sections: Any) -> Path:
    folder.mkdir(exist_ok=True)
    own = {"path": str(base), "adapters": {name: str(adapters / name) for name in ("one", "two")}}
    own |= sections.pop("model", {})
    return write_job(folder, base, rows, model=own, **{**PLAIN, **sections})


def rows_of(names: list[Any]) -> list[dict[str, Any]]:
    return [{"text": f"word {at // 2} and more of it", "who": name} for at, name in enumerate(names)]


def answers(path: Path) -> list[str | None]:
    return [row["generated_text"] for row in table(path)]


def alone(folder: Path, model: Path, rows: list[dict[str, Any]]) -> list[str | None]:
    """Return the answers of a model without adapters to all rows."""
    folder.mkdir()
    path = write_job(folder, model, rows, **PLAIN)
    assert run(path, REAL, FLOAT32).exit_code == 0
    return answers(path)


@pytest.fixture(scope="module")
def wanted(
    model: Path, models: Path, tmp_path_factory: pytest.TempPathFactory, warm_children: None
) -> dict[Any, list[Any]]:
    """Answers to the first rows by the model, and by the models that the adapters were merged into."""
    rows, folder = rows_of([None] * 18), tmp_path_factory.mktemp("alone")
    places = {None: model, "one": models / "merged-one", "two": models / "merged-two"}
    return {name: alone(folder / str(name), place, rows) for name, place in places.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [1, 2])
def test_rows_have_the_answers_of_the_merged_models(
    tmp_path: Path, model: Path, models: Path, wanted: dict[Any, list[Any]], replicas: int
) -> None:
    names: list[Any] = [None, "one", "two", "one", "two", None, "", "two", "three"] * 2
    rows = rows_of(names)
    path = job(
        tmp_path / "job",
        model,
        models,
        rows,
        model={"adapter_from_column": "who"},
        engine={"data_parallel": replicas},
        on_error={"max_error_rate": 0.5},
    )
    assert run(path, REAL, FLOAT32).exit_code == 0
    found = table(path)
    for at, (name, row) in enumerate(zip(names, found, strict=True)):
        if name == "three":
            assert (row["status"], row["error_code"]) == ("error", "bad_adapter")
            assert "'three'; model.adapters has one, two" in row["error_message"]
        else:
            assert row["generated_text"] == wanted[name or None][at]
    assert len({wanted[name][0] for name in wanted}) == 3, "adapters change answers"
    assert run(path, NO_ENGINE, FLOAT32).exit_code == 0


def computed(outcome: Outcome) -> int:
    assert outcome.exit_code == 0
    return int(outcome.row["computed_requests"] or 0)


def test_answers_are_reused_by_the_content_of_the_adapter(tmp_path: Path, model: Path, models: Path) -> None:
    """Another name or folder computes nothing; other weights compute the rows that use them."""
    adapters = tmp_path / "adapters"
    shutil.copytree(models / "one", adapters / "one")
    shutil.copytree(models / "two", adapters / "two")
    rows = rows_of(["one", "two", None, None, "one", "one"])
    path = job(tmp_path / "job", model, adapters, rows, model={"adapter_from_column": "who"})
    assert computed(run(path, REAL)) == 4, "of equal rows with one adapter one is run"
    shutil.move(adapters / "one", adapters / "uno")
    renamed = {"adapters": {"uno": str(adapters / "uno"), "two": str(adapters / "two")}}
    rows = [row | {"who": "uno" if row["who"] == "one" else row["who"]} for row in rows]
    job(tmp_path / "job", model, adapters, rows, model=renamed | {"adapter_from_column": "who"})
    assert computed(run(path, NO_ENGINE)) == 0
    shutil.rmtree(adapters / "uno")
    shutil.copytree(models / "two", adapters / "uno")
    before = answers(path)
    assert computed(run(path, REAL)) == 1, "the other row has the same work as its neighbour"
    changed = [old != new for old, new in zip(before, answers(path), strict=True)]
    assert changed[1:4] == [False] * 3
    assert any(changed)


def test_rows_without_an_adapter_use_the_jobs(
    tmp_path: Path, model: Path, models: Path, wanted: dict[Any, list[Any]]
) -> None:
    rows = rows_of([None, "two", None])
    chosen = {"adapter": "one", "adapter_from_column": "who"}
    path = job(tmp_path / "job", model, models, rows, model=chosen)
    assert run(path, REAL, FLOAT32).exit_code == 0
    assert answers(path) == [wanted["one"][0], wanted["two"][1], wanted["one"][2]]


def test_a_request_names_its_adapter_as_its_model(
    tmp_path: Path, model: Path, models: Path, wanted: dict[Any, list[Any]]
) -> None:
    lines = [
        {
            "custom_id": f"r{at}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": "word 0 and more of it", "max_tokens": 6, "temperature": 0},
        }
        for at, name in enumerate(["gpt-4o", "one", "two"])
    ]
    path = job(tmp_path / "job", model, models, lines, prompt=None, sampling=None, input={"format": "openai"})
    assert run(path, REAL, FLOAT32).exit_code == 0
    assert answers(path) == [wanted[name][0] for name in (None, "one", "two")]


def refused(tmp_path: Path, base: Path, models: Path, **sections: Any) -> str:
    with pytest.raises(BatchInferError) as found:
        run(job(tmp_path / "job", base, models, rows_of([None]), **sections), REAL)
    return str(found.value)


@pytest.mark.parametrize(("own", "reason"), [
    ({"adapter": "three"}, 'model.adapter: is "three", which model.adapters does not list; there are one, two'),
    ({"adapter_from_column": "whom"}, "model.adapter_from_column: the input has no column 'whom'"),
    ({"adapters": {}, "adapter_from_column": "who"}, "model.adapters lists none"),
])  # fmt: skip
def test_adapters_that_a_job_does_not_have(
    tmp_path: Path, model: Path, models: Path, own: dict[str, Any], reason: str
) -> None:
    assert reason in refused(tmp_path, model, models, model=own)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"use_dora": True}, "lora_magnitude_vector is missing"),
    ({"peft_type": "IA3"}, "only LORA is computed"),
    ({"bias": "all"}, "biases of an adapter"),
    ({"modules_to_save": ["lm_head"]}, "complete modules"),
    ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
    ({"alpha_pattern": {".*q_proj": 3}}, "alpha_pattern"),
    ({"lora_alpha": "many"}, "lora_alpha"),
])  # fmt: skip
def test_unsupported_adapters_are_refused(
    tmp_path: Path, model: Path, models: Path, changes: dict[str, Any], reason: str
) -> None:
    shutil.copytree(models / "one", tmp_path / "one")
    path = tmp_path / "one" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    said = refused(tmp_path, model, models, model={"adapters": {"mine": str(tmp_path / "one")}})
    assert "model.adapters.mine" in said
    assert reason in said


def test_the_job_of_the_page_runs(tmp_path: Path, model: Path, models: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text("utf-8")
    text = page.partition("```yaml\n")[2].partition("```")[0]
    for said, place in (
        ("models/base", model),
        ("adapters/summary", models / "one"),
        ("org/tone-lora", models / "two"),
    ):
        assert said in text
        text = text.replace(said, str(place))
    rows = [{"text": f"word {at}", "wanted": name} for at, name in enumerate(("tone", None))]
    (tmp_path / "tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(text)
    assert run(tmp_path / "job.yaml", REAL).row["rows_ok"] == 2
    job_file = load_job(tmp_path / "job.yaml", ())
    assert f"adapters: summary: {models / 'one'}, tone: {models / 'two'}" in job_file.describe()
    assert "adapters: none" in load_job(write_job(tmp_path, model, rows), ()).describe(defaults=True)
    said = "\n".join(validate_job(job_file))
    assert "adapters: summary, tone; rows that name none have summary" in said


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_a_dora_is_merged_if_all_rows_use_it(tmp_path: Path, family: str) -> None:
    """Otherwise it is rejected."""
    base, ends = (
        tmp_path / "base",
        {"llama": ENDS, "phi3": ("qkv_proj", "gate_up_proj"), "gpt2": ("c_attn", "c_proj")},
    )
    source = make_model_folder(base, family)
    shutil.copytree(base, tmp_path / "merged")
    make_adapter(tmp_path / "one", source, ends[family], dora=True)
    merged(source, tmp_path / "one").save_pretrained(tmp_path / "merged")
    rows = rows_of([None] * 4)
    own = {"path": str(base), "adapters": {"one": str(tmp_path / "one")}, "adapter": "one"}
    (tmp_path / "job").mkdir()
    path = write_job(tmp_path / "job", base, rows, model=own, **PLAIN)
    assert run(path, REAL, FLOAT32).exit_code == 0
    assert answers(path) == alone(tmp_path / "alone", tmp_path / "merged", rows)
    write_job(tmp_path / "job", base, None, model=own | {"adapter": None}, **PLAIN)
    with pytest.raises(BatchInferError, match="it must be the only adapter"):
        run(path, REAL)


def test_adapters_fit_the_channels_that_a_calibration_has_changed(
    tmp_path: Path, model: Path, models: Path
) -> None:
    """Log-probabilities are closer to float weights than without the channels' factors."""
    sections = {"model": {"adapter_from_column": "who"}, "sampling": {"max_tokens": 2, "logprobs": 5}}
    rows = [{"text": f"word {at} and more of it", "who": ("one", "two", None)[at % 3]} for at in range(12)]
    exact, coded = (job(tmp_path / name, model, models, rows, **sections) for name in ("exact", "int4"))
    int4 = ("model.quantization", "int4")
    assert run(exact, REAL, FLOAT32).exit_code == 0
    assert run(coded, REAL, FLOAT32, int4).row["quality_positions"] > 0
    near = distance(exact, coded)
    (factors,) = (coded.parent / "out").rglob(FILE)
    assert {name.rpartition(".")[2] for name in load_file(factors)} == {"inputs", "outputs"}
    save_file({}, factors)
    shutil.rmtree(coded.parent / "out" / "res")
    assert run(coded, REAL, FLOAT32, int4, ("cache.path", str(tmp_path / "others"))).exit_code == 0
    assert distance(exact, coded) > near


def distance(one: Path, other: Path) -> float:
    """Return the mean difference of the first tokens' log-probabilities."""
    pairs = zip(table(one), table(other), strict=True)
    return sum(abs(a["logprobs"][0]["logprob"] - b["logprobs"][0]["logprob"]) for a, b in pairs)


def test_the_plan_counts_the_memory_and_time_of_adapters(tmp_path: Path, model: Path, models: Path) -> None:
    """Their memory, and the time of their products for rows that use them."""
    rows = rows_of([None, "one", "two", "one"] * 2)
    own = {"model": {"adapter_from_column": "who"}, "sampling": {"max_tokens": 6, "ignore_eos": True}}
    paths = [
        job(tmp_path / "with", model, models, rows, **own),
        job(tmp_path / "none", model, models, rows_of([None] * 8), **own),
        write_job(tmp_path, model, rows, **{**PLAIN, "sampling": own["sampling"]}),
    ]
    adapted, unused, plain = (planned(path, FLOAT32) for path in paths)
    assert adapted.memory is not None
    assert plain.memory is not None
    checkpoint = inspect_checkpoint(model)
    stored = [inspect_adapter(name, models / name, checkpoint) for name in ("one", "two")]
    sizes = adapter_sizes(checkpoint.spec, stored)
    assert sizes is not None
    assert adapted.memory.weights - plain.memory.weights == sizes.values * 4
    runs = [found.forecast.run for found in (adapted, unused) if found.forecast is not None]
    assert runs[0].bytes > runs[1].bytes
