"""Tests the settings that decide answers: jobs that differ in them share no stored answer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.facts import this_machine
from batchinfer.plan.setup.job_setup import check_setup, work_context
from tests.batchinfer.wrong_jobs import Place
from tests.sentence_checkpoints import make_cross_encoder

SHAPE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
VECTORS = "task: embed\nembed: {pooling: mean}"


def context(place: Place, *extra: str, **sections: str) -> bytes:
    job = load_job(place.job(*extra, **sections))
    state = state_of(job)
    return work_context(check_setup(job, state, this_machine(job.engine.device)), state)


def test_answers_of_another_kind_and_checked_answers_are_other_work(place: Place) -> None:
    checked = f"output: {json.dumps({'path': 'out/res', 'schema': SHAPE})}"
    others = [
        context(place, output=checked),
        context(place, VECTORS, sampling="", prompt="prompt: {text: text}"),
        context(place, "task: score", sampling="", prompt="prompt: {text: text}"),
        context(place, "model: {path: model, dtype: bfloat16}", model=""),
    ]
    usual = context(place)
    assert usual == context(place, name="name: another", sampling="sampling: {max_tokens: 9}")
    assert len({usual, *others}) == 1 + len(others)


def test_a_changed_head_is_another_model(place: Place, tmp_path: Path) -> None:
    folder, found = tmp_path / "ranks", []
    make_cross_encoder(folder)
    for added in (0.0, 0.0, 1.0):
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name: one + added if name == "classifier.bias" else one for name, one in tensors.items()},
            folder / "model.safetensors", {"format": "pt"},
        )  # fmt: skip
        sections = {"model": f"model: {{path: {folder}}}", "prompt": "prompt: {text: id}", "sampling": ""}
        found.append(context(place, "task: rerank", "rerank: {document: text}", **sections))
    assert found[0] == found[1] != found[2]
