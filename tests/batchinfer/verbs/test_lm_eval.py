"""lm-evaluation-harness gets the same numbers from batchinfer as from its own transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchinfer.pipeline import library
from batchinfer.pipeline.result import RunResult
from tests.checkpoints import make_model_folder

pytestmark = pytest.mark.slow
TASKS: dict[str, dict[str, Any]] = {
    "choosing": {"output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": ["yes", "no", "not at all"], "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    "reading": {"output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{question}} {{question}}", "metric_list": [{"metric": "word_perplexity"},
        {"metric": "byte_perplexity"}]},
    "telling": {"output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": ["a", "."], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}]},
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of tasks over a file of questions."""
    rows = [{"question": f"Is the number {n} {'even ' * (n % 5)}?", "answer": n % 3} for n in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, task in TASKS.items():
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        }
        (folder / f"{name}.yaml").write_text(
            json.dumps({"task": name, "test_split": "test", **source, **task})
        )
    return folder


def test_the_numbers_are_those_of_its_own_model(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from batchinfer.verbs import lm_eval as ours

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    ran: list[RunResult] = []
    monkeypatch.setattr(ours, "run", lambda *job: ran.append(library.run(*job)) or ran[-1])
    checkpoint = tmp_path / "model"
    make_model_folder(checkpoint, "qwen3")
    models = {
        "hf": {"pretrained": str(checkpoint), "dtype": "float32", "max_length": 64, "device": "cpu"},
        "batchinfer": {"path": str(checkpoint), "folder": str(tmp_path / "jobs"), "max_length": 64},
    }

    def evaluated(model: str) -> Any:
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        options = {"tasks": [*TASKS], "task_manager": manager, "bootstrap_iters": 0, "batch_size": 4}
        return lm_eval.simple_evaluate(model, models[model], **options)

    own, found = evaluated("hf"), evaluated("batchinfer")
    for name in TASKS:
        for metric, value in own["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
        for one, other in zip(own["samples"][name], found["samples"][name], strict=True):
            assert one["doc"] == other["doc"]
            assert _values(other["resps"]) == pytest.approx(_values(one["resps"]), abs=1e-3)
            assert _texts(other["resps"]) == _texts(one["resps"])
    assert [bool(one.computed) for one in ran] == [True] * 3
    assert evaluated("batchinfer")["results"] == found["results"]
    assert [bool(one.computed) for one in ran[3:]] == [False] * 3, "a second evaluation computes nothing"


def _values(answers: Any) -> list[float]:
    """Return all numbers in nested answers."""
    if isinstance(answers, list | tuple):
        return [value for one in answers for value in _values(one)]
    return [] if isinstance(answers, str | bool) else [float(answers)]


def _texts(answers: Any) -> list[str | bool]:
    if isinstance(answers, list | tuple):
        return [value for one in answers for value in _texts(one)]
    return [answers] if isinstance(answers, str | bool) else []
