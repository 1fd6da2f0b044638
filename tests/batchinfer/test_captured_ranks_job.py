"""Ranks whose steps are captured with their collectives: as on GPUs, of which there are none. Triton's kernels are
interpreted, and gloo takes NCCL's place."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.plan.setup import job_setup, resolve
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.batchinfer.test_ranks_job import EXPERTS, FLOAT32, REAL, TENSOR
from tests.batchinfer.test_replicas import report
from tests.checkpoints import make_model_folder
from tests.examples import first_of

if importlib.util.find_spec("triton") is None or DEVICE == "cuda":
    pytest.skip("for machines with triton and without a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
)
ENGINE = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_memory": "1MiB"}
ON_GPUS = replace(REAL, engine="tests.batchinfer.engine.interpreted_gpu:build_capturing_later")


@pytest.mark.parametrize(("family", "division"), first_of((("llama", TENSOR), ("mixtral", EXPERTS)), 1))
def test_captured_steps_of_ranks_answer_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_children: None, family: str, division: str
) -> None:
    """Some captures come up in mid-job. All ranks meet in each of them, as a recording makes its collectives, and in
    each replay."""
    monkeypatch.setattr(job_setup, "check_device", lambda _: None)
    monkeypatch.setattr(resolve, "usable_gpus", lambda: ["0", "1"])
    experts = {"num_local_experts": 4} if family == "mixtral" else {}
    make_model_folder(tmp_path / "model", family, seed=2, num_hidden_layers=1, **experts)
    rows = [{"text": f"of all rows {n}"} for n in range(5)]
    found = []
    for name, engine, options, sets in (
        ("alone", {"device": "cpu"}, REAL, ()),
        ("ranks", {"device": "cuda"}, ON_GPUS, ((division, "2"),)),
    ):
        (tmp_path / name).mkdir()
        sampling = {"max_tokens": 6, "ignore_eos": True}
        path = write_job(
            tmp_path / name, tmp_path / "model", rows, prompt={"text": "text", "system": None, "user": None},
            sampling=sampling, engine=ENGINE | engine, model={"path": str(tmp_path / "model"), "max_model_len": 64},
        )  # fmt: skip
        row = run(path, options, FLOAT32, *sets).row
        found.append(table(path))
    assert found[0] == found[1]
    assert (row["device"], row["ranks"], row["worker_restarts"]) == ("cuda", 2, 0)
    assert row["full_graph_steps"] > 0
    assert row["piecewise_graph_steps"] > 0
    assert row["eager_steps"] == 0  # pieces cover what is not captured as a whole, or not yet
    steps = report(path, "steps")
    assert any(step["capture_s"] > 0 for step in steps), "none was captured in mid-job"
    assert {step["collective_s"] for step in steps} == {None}, "no host waits for them"
