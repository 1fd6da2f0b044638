"""Tests the report's costs of an engine's ranks: memory, bytes read, and time spent waiting for each other."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from batchinfer.engine.ranks.division import Division
from batchinfer.engine.ranks.shards import rank_shard
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.pipeline.options import RunOptions
from batchinfer.report.summary import summary
from tests.batchinfer.pipeline.test_pipeline import people, run, write_job
from tests.batchinfer.test_replicas import report
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_cores

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
    pytest.mark.skipif(
        len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
    ),
]
REAL = RunOptions(waves_from_s=float("inf"))
FLOAT32 = 4  # bytes
KV_BYTES = 24 << 20  # of all ranks
# In addition to weights and cache: libraries, a layer being packed, activations, and unused memory of loading
REST_BYTES = 64 << 20
# The weights are at least 160 MiB: a rank that loads all of them is noticed
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "mixtral": {
        "hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 10, "num_key_value_heads": 4,
        "head_dim": 64, "num_local_experts": 4,
    },
}  # fmt: skip
OPTIONS = {
    "tensor": "engine.tensor_parallel_size",
    "stages": "engine.pipeline_parallel_size",
    "experts": "engine.expert_parallel_size",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "sizes"), first_of((
    ("llama", {"tensor": 2}), ("llama", {"stages": 2}), ("mixtral", {"experts": 2}), ("mixtral", {"tensor": 2}),
    ("llama", {"tensor": 4}), ("llama", {"stages": 4}), ("llama", {"tensor": 2, "stages": 2}),
), 2))  # fmt: skip
def test_each_rank_reads_and_reports_only_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sizes: dict[str, int]
) -> None:
    """Its part of weights and files follows from the spec, with repeated weights, and its memory from its
    part."""
    has_cores(monkeypatch, 4)  # more ranks than there may be cores
    make_model_folder(tmp_path / "model", family, num_attention_heads=4, **SIZES[family])
    path = write_job(tmp_path, tmp_path / "model", people(12), engine={"kv_memory": KV_BYTES})
    sets = [("model.dtype", "float32"), *((OPTIONS[name], str(size)) for name, size in sizes.items())]
    row = run(path, REAL, *sets).row
    division, spec = Division(**sizes), inspect_checkpoint(tmp_path / "model").spec
    ranks, whole = report(path, "ranks"), FLOAT32 * parameter_count(spec)
    assert [one["rank"] for one in ranks] == [*range(division.ranks)]
    for one in ranks:
        own = FLOAT32 * parameter_count(shard_spec(spec, rank_shard(one["rank"], division, spec)))
        assert (one["weight_bytes"], one["read_bytes"]) == (own, own)
        assert one["kv_bytes"] <= KV_BYTES // division.ranks
        most = own + one["kv_bytes"] + REST_BYTES
        assert most < whole
        assert one["peak_rss_bytes"] - one["before_rss_bytes"] <= most
        assert one["stage"] == division.stage(one["rank"])
    assert row["rank_peak_rss_bytes"] == max(one["peak_rss_bytes"] for one in ranks)
    assert row["worker_peak_rss_bytes"] >= sum(one["peak_rss_bytes"] for one in ranks)
    assert row["rank_read_bytes"] == max(one["read_bytes"] for one in ranks)
    _check_times(row, ranks, report(path, "steps"), division)


def _check_times(
    row: dict[str, Any], ranks: list[dict[str, Any]], steps: list[dict[str, Any]], division: Division
) -> None:
    """Check that each rank waits for another rank's part, and no rank longer than the run."""
    took, said = row["engine_wall_s"], summary(row)
    assert "of the model" in said
    summed = [one["collective_s"] for one in ranks]
    if division.peers > 1:
        assert all(0 < one["collective_s"] <= one["model_s"] for one in steps)
        assert row["collective_s"] == pytest.approx(sum(one["collective_s"] for one in steps))
        assert summed[0] == pytest.approx(row["collective_s"])
        assert all(0 < spent < took for spent in summed)
        assert row["collective_share"] == row["collective_s"] / took
        assert "sums over ranks" in said
    else:
        assert {
            row["collective_s"],
            row["collective_share"],
            *summed,
            *(s["collective_s"] for s in steps),
        } == {None}
        assert "sums over ranks" not in said
    waits = [one["stage_wait_s"] for one in ranks]
    if division.stages > 1:
        assert all(wait > 0 for wait in waits)
        assert row["stage_wait_s"] == pytest.approx(sum(waits) / len(waits))
        assert row["stage_wait_share"] == row["stage_wait_s"] / took < 1
        assert "stages waiting for one another" in said
    else:
        assert {row["stage_wait_s"], *waits} == {None}
        assert "stages waiting" not in said
