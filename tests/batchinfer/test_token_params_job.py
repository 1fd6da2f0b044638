"""Runs whole jobs whose parameters name tokens: answers equal transformers', and unknown tokens are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from batchinfer.core.errors import JobFileError
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, run, table, write_job
from tests.batchinfer.test_to_openai import batch, completion
from tests.checkpoints import make_model_folder

REAL = RunOptions()
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "model"
    make_model_folder(folder, seed=3)
    return folder


def greedy_of(model: Any, prompt: list[int], most: int, **options: Any) -> list[int]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=most, do_sample=False, use_cache=False, **options
        )
    ids: list[int] = found[0, len(prompt) :].tolist()
    return ids


def write_ids_job(folder: Path, model: Path, rows: list[Any], sampling: dict[str, Any]) -> Path:
    """Write a job whose rows are token ids."""
    path = write_job(folder, model, rows, sampling=sampling, model={"dtype": "float32"})
    job = json.loads(path.read_text()) | {"prompt": {"token_ids": "ids"}}
    path.write_text(json.dumps(job))
    return path


SPACE = 220  # 66 is c, 67 is d
ALLOWED = [3, 70, 71, 72, 90]
# Parameters of rows, and their names in transformers
KINDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"logit_bias": {"70": 1.5, "71": 1.5, "65": -100}}, {"sequence_bias": {(70,): 1.5, (71,): 1.5, (65,): -100.0}}),
    ({"logit_bias": {"80": 100}}, {"sequence_bias": {(80,): 100.0}}),
    ({"logit_bias": {"66": 60, "67": 60}, "bad_words": ["cd", "dd", "ab"]},
        {"sequence_bias": {(66,): 60.0, (67,): 60.0}, "bad_words_ids": [[66, 67], [SPACE, 66, 67], [67, 67],
        [SPACE, 67, 67], [64, 65]]}),
    ({"logit_bias": {"66": 60, "67": 60}, "bad_words": "c"}, {"sequence_bias": {(67,): 60.0}}),
    ({"allowed_token_ids": ALLOWED}, {"prefix_allowed_tokens_fn": lambda batch, ids: ALLOWED}),
]  # fmt: skip


def test_answers_equal_transformers(tmp_path: Path, real: Path) -> None:
    """Rows with their own parameters, next to rows without."""
    model = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32).eval()
    rows = [{"ids": PROMPT[: 4 + n], **KINDS[n % len(KINDS)][0]} for n in range(2 * len(KINDS))]
    names = sorted({name for asked, _ in KINDS for name in asked})
    sampling = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0, "from_columns": names}
    path = write_ids_job(tmp_path, real, rows, sampling)
    assert run(path, REAL).exit_code == 0
    found = set()
    for number, (row, given) in enumerate(zip(table(path), rows, strict=True)):
        options = KINDS[number % len(KINDS)][1]
        wanted = greedy_of(model, given["ids"], 12, eos_token_id=None, **options)
        assert [one["token_id"] for one in row["logprobs"]] == wanted
        found.add(row["generated_text"])
    assert len(found) > len(KINDS)


def test_an_unknown_token_is_an_error_row_or_a_mistake(tmp_path: Path, model: Path) -> None:
    path = batch(
        tmp_path,
        model,
        completion("a", logit_bias={"99999": 1}),
        completion("b"),
        on_error={"max_error_rate": 1, "publish": True},
    )
    run(path)
    bad, good = table(path)
    assert (bad["error_code"], good["status"]) == ("token_id_out_of_range", "ok")
    assert "logit_bias: token id 99999; the model knows ids below" in bad["error_message"]
    with pytest.raises(JobFileError, match=r"sampling.logit_bias: token id 99999; the model knows"):
        run(path, NO_ENGINE, ("sampling.logit_bias", "{99999: 1}"))
