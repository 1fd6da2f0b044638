"""Runs whole jobs on a GPU, from the file to the report, or in Triton's interpreter without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.core.errors import Unavailable
from batchinfer.core.samples import LAUNCH_MODES
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.report.tables.folder import report_folder
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.batchinfer.killed_runs import published
from tests.batchinfer.pipeline.test_pipeline import run, table, write_job
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_gpus

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

ENGINE = {"device": "cuda", "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_memory": "1MiB"}
WITHOUT = (
    r"needs the Triton operators: triton is not installed; install it \(pip install triton\), or take it out"
)
SLOWLY = {"max_num_seqs": 1, "max_num_batched_tokens": 7, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder, seed=2, num_hidden_layers=1)
    return folder


def job(folder: Path, model: Path, quantization: str, kv_cache_dtype: str = "auto", **engine: Any) -> Path:
    folder.mkdir()
    codes = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    return write_job(
        folder, model, [{"text": f"number {n} " * (1 + n % 2)} for n in range(1, 4)],
        model={"path": str(model), "max_model_len": 64, **codes},
        prompt={"text": "text", "system": None, "user": None},
        sampling={"max_tokens": 2, "temperature": 1.5, "ignore_eos": True, "logprobs": 2},
        engine=ENGINE | engine,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the stand-in for a GPU if there is none; it selects Triton's interpreter."""
    if DEVICE == "cpu":
        has_gpus(monkeypatch)


def run_on_gpu(path: Path, factory: str = "build_quick") -> Outcome:
    return run(path, RunOptions(engine=f"tests.batchinfer.engine.interpreted_gpu:{factory}"))


@pytest.mark.parametrize("again", first_of((False, True), 1))
def test_a_quantised_deterministic_job_from_file_to_report(tmp_path: Path, model: Path, again: bool) -> None:
    """The report states the settings. Published bytes of another run do not depend on chunks."""
    at_once = job(tmp_path / "at-once", model, "int8", "fp8", deterministic=True)
    outcome = run_on_gpu(at_once)
    assert outcome.exit_code == 0
    row = outcome.row
    assert (row["device"], row["dtype"], row["quantization"], row["deterministic"]) == (
        "cuda", "float32", "int8", True,
    )  # fmt: skip
    assert row["kv_cache_dtype"] == "fp8"
    assert dict(row["ops"]) == {"decoder": "triton", "linear": "int8"}
    assert sum(row[f"{mode}_steps"] for mode in LAUNCH_MODES) == row["steps"] > row["eager_steps"]
    assert row["load_capture_s"] > 0 <= row["capture_s"]
    assert (row["load_graph_bytes"] > 0, row["graph_bytes"] >= 0, row["load_free_bytes"] > 0) == (True,) * 3
    assert (row["rows_ok"], row["decode_tokens_run"] > 0) == (3, True)
    if again:
        slowly = job(tmp_path / "slowly", model, "int8", "fp8", deterministic=True, **SLOWLY)
        assert run_on_gpu(slowly).exit_code == 0
        assert published(at_once) == published(slowly)
    found = table(at_once)
    assert len({row["generated_text"] for row in found}) > 1
    tokens = [token for row in found for token in row["logprobs"]]
    assert all(token["logprob"] <= token["top"][0]["logprob"] < 0 for token in tokens)


@pytest.mark.parametrize(
    ("quantization", "deterministic"), [("int8", False), pytest.param("none", True, marks=pytest.mark.slow)]
)
def test_options_that_need_triton_are_refused_without_it(
    tmp_path: Path, model: Path, quantization: str, deterministic: bool
) -> None:
    path = job(tmp_path / "job", model, quantization, deterministic=deterministic)
    with pytest.raises(Unavailable, match=WITHOUT) as refused:
        run_on_gpu(path, "build_without_triton")
    assert refused.value.exit_code == 69
    runs = report_folder(path.parent / "out" / "res")
    assert duckdb.sql(f"SELECT exit_code FROM '{runs}/run-*.parquet'").fetchall() == [(69,)]
    assert not (path.parent / "out" / "res").exists()


@pytest.mark.slow
def test_experts_count_each_token_once(tmp_path: Path) -> None:
    """Neither steps of the warm-up and captures nor padding count."""
    make_model_folder(tmp_path / "model", "qwen2_moe", seed=2)
    path = job(tmp_path / "job", tmp_path / "model", "none", max_num_seqs=4, max_num_batched_tokens=512)
    assert run_on_gpu(path, "build").exit_code == 0
    tables = report_folder(path.parent / "out" / "res")
    (padded, ran), *_ = duckdb.sql(
        f"SELECT sum(padded_tokens), sum(prefill_tokens + decode_tokens)::BIGINT FROM '{tables}/steps-*.parquet'"
    ).fetchall()
    loads = duckdb.sql(f"SELECT sum(tokens)::BIGINT FROM '{tables}/experts-*.parquet' GROUP BY layer")
    assert padded > 0
    assert loads.fetchall() == [(3 * ran,)] * 2
