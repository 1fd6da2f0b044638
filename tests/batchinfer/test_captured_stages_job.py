"""Tests pipeline stages that capture steps, without GPUs: Triton is interpreted, tapes replace graphs, gloo
NCCL."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, REAL, STAGES, TENSOR, assert_alike
from tests.batchinfer.test_replicas import report
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_gpus

if importlib.util.find_spec("triton") is None or DEVICE == "cuda":
    pytest.skip("for machines with triton and without a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
ON_GPUS, UNCAPTURED = (
    replace(REAL, engine=f"tests.batchinfer.engine.interpreted_gpu:build_{how}")
    for how in ("preempting", "uncaptured")
)
SHAPE = {"num_hidden_layers": 2, "num_key_value_heads": 2}
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_memory": "1MiB", "block_size": 8}
SAMPLED = {"temperature": 1.2, "logprobs": 2, "frequency_penalty": 0.5}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
GUIDED = {"sampling": {"max_tokens": 12, "logprobs": 1}, "output": {"schema": SCHEMA}}


@dataclass(frozen=True)
class Work:
    """A job of prompts with a shared prefix, some of them prefilled in chunks."""

    family: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    options: tuple[tuple[str, str], ...] = (FLOAT32,)
    rows: int = 8

    def job(self, folder: Path, **engine: Any) -> Path:
        folder.mkdir()
        model = folder.parent / "model"
        if not model.exists():
            make_model_folder(model, self.family, seed=2, **SHAPE | self.shape)
        texts = (f"of all rows that there are {n} " + "and more " * (n % 3) for n in range(self.rows))
        rows = [{"text": text} for text in texts]
        sections = {
            "prompt": {"text": "text", "system": None, "user": None},
            "sampling": {"max_tokens": 9, "ignore_eos": True},
            "model": {"path": str(model), "max_model_len": 64},
        } | self.sections
        return write_job(folder, model, rows, engine=ENGINE | engine, **sections)

    def found(
        self, folder: Path, options: RunOptions, sizes: dict[str, int], **engine: Any
    ) -> tuple[Path, Any]:
        """Run the job; return its file and its row in the report."""
        path = self.job(folder, **engine)
        return path, run(path, options, *self.options, *((key, str(size)) for key, size in sizes.items())).row


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, "0", "1", "2", "3")


def check_launches(path: Path, options: RunOptions) -> None:
    """Check that engines shared graphs, some of them captured during the job, with preemptions and
    look-ahead."""
    steps = report(path, "steps")
    launches = {step["launch"] for step in steps}
    assert launches == ({"eager"} if options is UNCAPTURED else {"full_graph", "piecewise_graph"})
    assert any(step["capture_s"] > 0 for step in steps) == (options is ON_GPUS), "in mid-job"
    assert sum(step["preemptions"] for step in steps) > 0
    assert sum(step["cached_tokens"] for step in steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("work", "sizes", "options"), [
    (Work("qwen3"), {STAGES: 2}, ON_GPUS),
    (Work(), {STAGES: 2, TENSOR: 2}, ON_GPUS),
    (Work("qwen3", {"num_hidden_layers": 3}), {STAGES: 3}, ON_GPUS),
    (Work(), {STAGES: 2}, UNCAPTURED),
    (Work("mixtral", {"num_local_experts": 4}), {STAGES: 2, EXPERTS: 2}, ON_GPUS),
    (Work("gemma3_text", {"num_hidden_layers": 4, "sliding_window": 16}), {STAGES: 2}, ON_GPUS),
    (Work(sections=GUIDED), {STAGES: 2}, ON_GPUS),
])  # fmt: skip
def test_stages_on_gpus_answer_as_one_process_does(
    tmp_path: Path, work: Work, sizes: dict[str, int], options: RunOptions
) -> None:
    alone, _ = work.found(tmp_path / "alone", REAL, {}, device="cpu")
    path, row = work.found(tmp_path / "stages", options, sizes, device="cuda", max_num_seqs=2 * sizes[STAGES])
    assert_alike(table(path), table(alone))
    ranks = sizes[STAGES] * sizes.get(TENSOR, 1) * sizes.get(EXPERTS, 1)
    assert (row["device"], row["ranks"], row["worker_restarts"]) == ("cuda", ranks, 0)
    check_launches(path, options)
    assert row["stage_wait_s"] is None, "no host waits for another stage"


@pytest.mark.parametrize("dtype", first_of(("float32", "bfloat16"), 1))
def test_captured_stages_keep_the_bits(tmp_path: Path, dtype: str) -> None:
    """Sampled answers and log-probabilities equal a single GPU's."""
    sections = {"sampling": {"max_tokens": 5, "ignore_eos": True} | SAMPLED}
    options = ("model.dtype", dtype), ("engine.deterministic", "true")
    work, found = Work(sections=sections, options=options, rows=4), []
    for name, launched, sizes in (("alone", UNCAPTURED, {}), ("stages", ON_GPUS, {STAGES: 2})):
        path, row = work.found(tmp_path / name, launched, sizes, device="cuda", data_parallel=1)
        found.append([file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))])
    assert found[0] == found[1]
    assert (row["device"], row["ranks"], row["worker_restarts"]) == ("cuda", 2, 0)
    check_launches(path, ON_GPUS)
    assert row["stage_wait_s"] is None, "no host waits for another stage"
