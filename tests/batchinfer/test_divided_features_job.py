"""Runs whole jobs with sharded models: adapters, drafts and log-probabilities equal one process's.

Unsupported combinations are rejected before the input is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.costed_engine import known_peaks
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_drafts_job import EVERY, REAL, echoing
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, STAGES, TENSOR, assert_alike
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.lora_adapters import make_adapter
from tests.settings import has_cores

pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
NAMES = (None, "one", "two")
BOTH = {STAGES: 2, TENSOR: 2}
GREEDY = {"max_tokens": 24, "logprobs": 2}
SAMPLED = GREEDY | {"temperature": 0.4, "seed": 3}
WORK: dict[str, dict[str, Any]] = {
    "adapters": {"drafts": "off"},
    "drafts": {"drafts": EVERY},
    "adapters and drafts": {"drafts": "auto"},
    "sampled drafts": {"drafts": EVERY, "sampling": SAMPLED},
    "a draft model": {"drafts": "MODEL"},
}


@pytest.fixture(autouse=True, scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with known_peaks(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two adapters of all its layers."""
    folder = tmp_path_factory.mktemp("models")
    make_model_folder(folder / "model", num_hidden_layers=3, num_key_value_heads=2)
    source: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder / "model")
    for seed, name in enumerate(NAMES[1:]):
        make_adapter(folder / str(name), source, ("q_proj", "v_proj", "down_proj"), seed=seed)
    return folder


def job(folder: Path, models: Path, adapters: bool, **sections: Any) -> Path:
    """Write a job whose rows repeat themselves and each other, some of them with an adapter."""
    folder.mkdir()
    rows = [
        {"text": f"row {at // 3} has some words, and row {at // 6} has", "who": NAMES[at % 3]}
        for at in range(15)
    ]
    named = {"adapters": {name: str(models / name) for name in NAMES if name}, "adapter_from_column": "who"}
    own = {"path": str(models / "model")} | (named if adapters else {})
    plain = {"prompt": {"text": "text", "system": None, "user": None}, "sampling": GREEDY}
    return write_job(
        folder, models / "model", rows, model=own, engine={"max_num_seqs": 4}, **{**plain, **sections}
    )


@pytest.mark.parametrize(("what", "division"), first_of((
    ("adapters and drafts", {STAGES: 2}),
    *((what, BOTH) for what in WORK),
    *((what, {STAGES: 3}) for what in WORK),
    *((what, {TENSOR: 2}) for what in WORK),
    *((what, {STAGES: 2}) for what in WORK if what != "adapters and drafts"),
), 1))  # fmt: skip
def test_a_divided_model_answers_as_one_process_does(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, what: str, division: dict[str, int]
) -> None:
    """Log-probabilities are compared, too. The single process has no drafts."""
    has_cores(monkeypatch, 4)
    sections = dict(WORK[what])
    if sections.get("drafts") == "MODEL":
        sections["drafts"] = {"model": str(models / "model")}
    found = []
    for name, sets, drafts in (("alone", {}, {"drafts": "off"}), ("divided", division, {})):
        path = job(tmp_path / name, models, "adapters" in what, **{**sections, **drafts})
        row = run(path, REAL, FLOAT32, *((key, str(size)) for key, size in sets.items())).row
        assert row["exit_code"] == 0
        found.append(table(path))
    assert_alike(*found)
    assert row["ranks"] == division.get(STAGES, 1) * division.get(TENSOR, 1)
    assert (row["accepted_tokens"] > 0) == ("draft" in what)
    if "adapters" in what:
        assert len({row["generated_text"] for row in found[0][:3]}) == 3, "adapters change answers"


@pytest.mark.parametrize("division", [TENSOR, STAGES, EXPERTS])
@pytest.mark.parametrize(("drafts", "reason"), [
    ("beside", r"drafts\.runs: beside: the job's model is sharded among ranks, which must all run the same steps"),
    ("heads", r"drafts\.heads: draft heads do not work with a model that is sharded among ranks; remove them"),
])  # fmt: skip
def test_draft_heads_and_draft_models_are_refused_with_ranks(
    tmp_path: Path, models: Path, division: str, drafts: str, reason: str
) -> None:
    model = models / "model"
    if division == EXPERTS:
        model = make_folder_of_experts(tmp_path)
    asked = {"model": str(model), "runs": "beside"}
    if drafts == "heads":
        asked = {"heads": str(echoing(model, tmp_path / "heads"))}
    path = job(tmp_path / "job", model.parent, adapters=False, drafts=asked)
    with pytest.raises(JobFileError, match=reason) as refused:
        validate_job(load_job(path, (FLOAT32, (division, "2"))))
    assert refused.value.exit_code == 78


def make_folder_of_experts(folder: Path) -> Path:
    make_model_folder(folder / "model", "mixtral", num_local_experts=4)
    return folder / "model"
