"""Tests damaged JSON files of a checkpoint: an error names the file, or the job works."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from batchinfer import cli
from tests.batchinfer.wrong_jobs import ROWS, Place, make_place
from tests.checkpoints import make_model_folder
from tests.mutants import Mutant, file_mutants, mutants

FEW, MANY = 2, 250  # of each file
RUNS = 12  # of the many that are accepted
REFUSED = (77, 78)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# Family, file, and additional content that the tests' checkpoints do not have
FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "config": ("llama", "config.json", {}),
    "config of experts": ("gpt_oss", "config.json", {}),
    "config of latents": ("deepseek_v3", "config.json", {}),
    "config of quantised weights": ("llama", "config.json", {"quantization_config": FP8}),
    "generation": ("llama", "generation_config.json", {"eos_token_id": [257, 258]}),
    "weight index": ("llama", "model.safetensors.index.json", {}),
    "tokenizer": ("llama", "tokenizer.json", {}),
    "tokenizer config": ("llama", "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "x"}]}),
    "special tokens": ("llama", "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False}}),
    "added tokens": ("llama", "added_tokens.json", {"<|im_end|>": 257}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint per family, and one with an index of its weights."""
    found = {
        name: tmp_path_factory.mktemp("models") / "model" for name in ("llama", "gpt_oss", "deepseek_v3")
    }
    for family, folder in found.items():
        make_model_folder(folder, family, shards=2 if family == "llama" else 1)
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def told(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = cli._guarded([str(argument) for argument in arguments])
        found = capsys.readouterr()
        return code, found.out + found.err

    return told


def drawn(name: str, data: bytes, count: int) -> list[Mutant]:
    """Return fixed random mutants of a file."""
    found = list(mutants(data))
    return random.Random(name).sample(found, min(count, len(found)))


def prepared(place: Place, name: str) -> Path:
    """Return the file of the place's own model with the additional content."""
    _, file, more = FILES[name]
    path = place.own_model() / file
    there = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(there | more))
    place.rows(*ROWS[:2])
    return path


def check_refused(mutant: Mutant, path: Path, code: int, told: str) -> None:
    assert code in REFUSED, f"{mutant.name}: {code}\n{told}"
    assert path.stem in told, f"{mutant.name}: the file is not named\n{told}"
    assert "Traceback" not in told
    assert "panicked" not in told
    assert max(map(len, told.splitlines())) < 1200, f"{mutant.name}: a message shows too much of a value"


def check(place: Place, path: Path, damaged: list[Mutant], run: Any) -> list[Mutant]:
    """Return the damaged files that were accepted."""
    accepted = []
    for mutant in damaged:
        path.write_bytes(mutant.data)
        code, told = run("validate", place.folder / "job.yaml")
        if code == 0:
            accepted.append(mutant)
        else:
            check_refused(mutant, path, code, told)
    return accepted


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FILES)
def test_some_damaged_files(name: str, tmp_path: Path, models: dict[str, Path], run: Any) -> None:
    place = make_place(tmp_path / "job", models[FILES[name][0]])
    path = prepared(place, name)
    check(place, path, drawn(name, path.read_bytes(), FEW), run)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_files(name: str, tmp_path: Path, models: dict[str, Path], run: Any) -> None:
    """Some of the accepted ones are run."""
    place = make_place(tmp_path / "job", models[FILES[name][0]])
    path = prepared(place, name)
    accepted = check(place, path, drawn(name, path.read_bytes(), MANY), run)
    for mutant in islice(accepted, RUNS):
        path.write_bytes(mutant.data)
        shutil.rmtree(place.folder / "out", ignore_errors=True)
        code, told = run("run", place.folder / "job.yaml", "-q")
        if code != 0:
            check_refused(mutant, path, code, told)


@pytest.mark.slow
def test_damaged_chat_templates(tmp_path: Path, models: dict[str, Path], run: Any) -> None:
    """A template that gives empty prompts or raises makes error rows, more than the job allows."""
    place = make_place(tmp_path / "job", models["llama"])
    path = place.own_model() / "chat_template.jinja"
    for mutant in file_mutants(path.read_bytes()):
        path.write_bytes(mutant.data)
        code, told = run("validate", place.folder / "job.yaml")
        if code == 65:
            assert "20 of 20 rows are errors" in told, f"{mutant.name}: {told}"
        elif code:
            check_refused(mutant, path, code, told)
