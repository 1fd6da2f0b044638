"""Stages whose steps are captured, as on GPUs, of which there are none: Triton's kernels are interpreted, tapes take the
place of graphs, and gloo that of NCCL."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.plan.setup import job_setup, resolve
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, REAL, STAGES, TENSOR
from tests.batchinfer.test_replicas import report
from tests.checkpoints import make_model_folder
from tests.examples import first_of

if importlib.util.find_spec("triton") is None or DEVICE == "cuda":
    pytest.skip("for machines with triton and without a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
ON_GPUS = replace(REAL, engine="tests.batchinfer.engine.interpreted_gpu:build_capturing_later")
# So little that sequences are preempted, and of prompts that share their beginnings, in parts of a step
ENGINE = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "kv_memory": "1MiB", "block_size": 8}


@dataclass(frozen=True)
class Work:
    """A job of a few rows."""

    family: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path, options: Any, *sets: tuple[str, str], **engine: Any) -> Path:
        """Run it, and return the job file."""
        folder.mkdir()
        model = folder.parent / "model"
        if not model.exists():
            make_model_folder(model, self.family, seed=2, **{"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 64} | self.shape)
        rows = [{"text": f"of all rows that there are {n} " + "and more " * (n % 3)} for n in range(7)]
        return write_job(
            folder, model, rows, prompt={"text": "text", "system": None, "user": None},
            sampling={"max_tokens": 8, "ignore_eos": True} | self.sampling,
            engine=ENGINE | self.engine | engine, model={"path": str(model), "max_model_len": 96}, **self.sections,
        )  # fmt: skip


def test_try(tmp_path, monkeypatch):
    gpus(monkeypatch)
    work = Work()
    found = []
    for name, options, engine, sets in (
        ("alone", REAL, {"device": "cpu"}, ()),
        ("stages", ON_GPUS, {"device": "cuda"}, ((STAGES, "2"),)),
    ):
        path = work.run(tmp_path / name, options, *sets, **engine)
        row = run(path, options, FLOAT32, *sets).row
        found.append(table(path))
    for step in report(path, "steps"):
        print({k: step[k] for k in ("step", "launch", "running", "waiting", "prefill_tokens", "decode_tokens", "cached_tokens", "preemptions", "blocks_used", "blocks_total", "capture_s", "padded_tokens")})
    print({k: row[k] for k in ("full_graph_steps", "piecewise_graph_steps", "eager_steps", "ranks", "stage_wait_s", "preemptions")})
    assert found[0] == found[1]


def gpus(monkeypatch):
    monkeypatch.setattr(job_setup, "check_device", lambda _: None)
    monkeypatch.setattr(resolve, "usable_gpus", lambda: ["0", "1", "2", "3"])
