"""Documentation of the job file: its schema, its page, and the example of `init`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from batchinfer.job import Job, init_files, init_text, job_schema, load_job
from batchinfer.job.yaml_tree import read_yaml
from batchinfer.verbs.starter import write_starter
from batchinfer_kernels.arithmetic import RequestedQuantization

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = (REPOSITORY / "docs/job-file.md").read_text()


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each dotted key with its schema, sections included."""
    schema = job_schema()
    for name, part in schema["properties"].items():
        yield name, part
        for one in [part, *part.get("anyOf", [])]:
            if "$ref" in one:
                section = schema["$defs"][one["$ref"].rsplit("/", 1)[1]]
                yield from ((f"{name}.{key}", inner) for key, inner in section["properties"].items())


OPTIONS = dict(options())
LEAVES = {key: part for key, part in OPTIONS.items() if "." in key}


def test_the_schema_is_json_and_strict() -> None:
    schema = job_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["required"]) == {"name", "model", "input", "output"}
    assert schema["additionalProperties"] is False
    assert all(one["additionalProperties"] is False for one in schema["$defs"].values())
    assert set(schema["properties"]) == set(Job.model_fields)
    assert len(LEAVES) > 40


def test_every_option_says_what_it_is_for() -> None:
    for key, option in OPTIONS.items():
        assert re.fullmatch(r"[^`]{15,}\.", option["description"]), key
        assert "](" not in option["description"], key


def test_the_document_names_no_option_that_is_none() -> None:
    sections = {name for name in OPTIONS if "." not in name}
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", DOCUMENT)) - {"config.json", "tokenizer.json"}
    assert {key for key in named if key.split(".")[0] in sections} <= set(LEAVES)


def test_the_example_of_the_document_loads(tmp_path: Path) -> None:
    (tmp_path / "models/qwen2.5-7b").mkdir(parents=True)
    example = re.search(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert example is not None
    (tmp_path / "job.yaml").write_text(example[1])
    job = load_job(tmp_path / "job.yaml", date="2026-03-04")
    assert job.output.path == tmp_path / "results/tickets/2026-03-04"
    assert job.results_root == tmp_path / "results/tickets"
    assert job.prompt is not None
    assert job.prompt.user == "Answer with one word: billing, technical or other.\n{{ body }}\n"


@pytest.mark.parametrize("model", ["m", "my models/ü 'x' \"y\"", "a$b/${c}", "a\\b: c"])
def test_the_first_job_loads(tmp_path: Path, model: str) -> None:
    (tmp_path / model).mkdir(parents=True)
    for name, text in init_files(model).items():
        (tmp_path / name).write_text(text)
    job = load_job(tmp_path / "job.yaml", env={})
    assert job.model.path == tmp_path / model
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert job.input.path == str(tmp_path / "prompts.jsonl")
    assert job.input.id is not None
    assert all({job.input.id, *job.output.columns, "question"} <= set(row) for row in rows)
    assert init_files(model)["job.yaml"] == init_text(model)


@pytest.mark.parametrize(("config", "weights", "told"), [
    ({}, "model.safetensors", "folder with config.json|change answers"),
    ({"quantization_config": {"quant_method": "fp8"}}, "model.safetensors", "as the checkpoint stores"),
    (None, "model.gguf", "GGUF: weights, configuration.*dequantised while loading"),
    (None, "model.safetensors", "folder with config.json|change answers"),
])  # fmt: skip
def test_the_first_job_fits_its_folder_and_its_model(
    tmp_path: Path, config: dict[str, Any] | None, weights: str, told: str
) -> None:
    """The job has the name of its folder, and lists all quantisations."""
    model, folder = tmp_path / "m", tmp_path / "a 'job': $x\n"
    model.mkdir()
    (model / weights).write_bytes(b"")
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    for path in [model, model / weights] if weights.endswith(".gguf") else [model]:
        write_starter(folder, str(path))
        text = (folder / "job.yaml").read_text()
        assert re.search(f"(?s){told}", text)
        assert load_job(folder / "job.yaml", env={}).name == "a 'job': $x-"
        listed = re.search(r"quantization: auto +# or (.*)", text)
        assert listed is not None
        assert {"auto", *listed[1].split(", ")} == set(get_args(RequestedQuantization))
        shutil.rmtree(folder)


def test_the_first_job_uses_only_what_the_schema_has() -> None:
    root, findings = read_yaml(init_text("m"))
    assert findings == []
    assert root is not None
    assert isinstance(root.value, dict)
    for section, entry in root.value.items():
        inner = entry.node.value
        keys = [f"{section}.{key}" for key in inner] if isinstance(inner, dict) else [section]
        assert set(keys) <= set(OPTIONS)


def test_the_job_that_is_shipped_loads() -> None:
    job = load_job(REPOSITORY / "jobs/quickstart/job.yaml", [("model.path", ".")])
    assert job.output.path == REPOSITORY / "results/quickstart"
