"""Whole jobs that ask for a GPU, from the file to the report. Without one, Triton's kernels are interpreted."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchinfer.core.errors import Unavailable
from batchinfer.core.samples import LAUNCH_MODES
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from batchinfer.report.tables.folder import report_folder
from tests.batchinfer.engine.interpreted_gpu import DEVICE
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_gpus

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

HELPERS = "tests.batchinfer.engine.interpreted_gpu"
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


def write_job(
    folder: Path, model: Path, quantization: str, kv_cache_dtype: str = "auto", **engine: Any
) -> Path:
    folder.mkdir()
    rows = [{"text": f"number {n} " * (1 + n % 2)} for n in range(1, 4)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "name": "on-a-gpu",
        "model": {
            "path": str(model),
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "max_model_len": 64,
        },
        "input": {"path": "in.jsonl"},
        "prompt": {"text": "text"},
        "sampling": {"max_tokens": 2, "temperature": 1.5, "ignore_eos": True, "logprobs": 2},
        "output": {"path": "out/res"},
        "engine": ENGINE | engine,
    }
    (folder / "job.yaml").write_text(json.dumps(job))  # JSON is YAML
    return folder / "job.yaml"


@pytest.fixture(autouse=True)
def a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, its stand-in is one; it sees to how Triton is imported."""
    if DEVICE == "cpu":
        has_gpus(monkeypatch)


def run(path: Path, factory: str = "build_quick") -> Outcome:
    notices: list[str] = []
    progress = Progress(io.StringIO(), quiet=True)
    options = RunOptions(engine=f"{HELPERS}:{factory}")
    return run_job(load_job(path), options, progress, Interrupts(), notices.append)


def published(path: Path) -> list[str]:
    files = sorted((path.parent / "out" / "res").glob("*.parquet"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize("again", first_of((False, True), 1))
def test_codes_and_deterministic_from_the_file_to_the_report(
    tmp_path: Path, model: Path, again: bool
) -> None:
    """The report says what was run; and run again, the published bytes do not depend on how the work was cut."""
    at_once = write_job(tmp_path / "at-once", model, "int8", "fp8", deterministic=True)
    outcome = run(at_once)
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
        slowly = write_job(tmp_path / "slowly", model, "int8", "fp8", deterministic=True, **SLOWLY)
        assert run(slowly).exit_code == 0
        assert published(at_once) == published(slowly)
    results = f"'{at_once.parent}/out/res/*.parquet'"
    texts = duckdb.sql(f"SELECT generated_text FROM {results}").fetchall()
    assert len(set(texts)) > 1
    found = duckdb.sql(
        f"SELECT t.logprob, t.top[1].logprob FROM (SELECT unnest(logprobs) AS t FROM {results})"
    )
    assert all(chosen <= likeliest < 0 for chosen, likeliest in found.fetchall())


@pytest.mark.parametrize(
    ("quantization", "deterministic"), [("int8", False), pytest.param("none", True, marks=pytest.mark.slow)]
)
def test_what_only_triton_can_do_is_refused_without_it(
    tmp_path: Path, model: Path, quantization: str, deterministic: bool
) -> None:
    path = write_job(tmp_path / "job", model, quantization, deterministic=deterministic)
    with pytest.raises(Unavailable, match=WITHOUT) as refused:
        run(path, "build_without_triton")
    assert refused.value.exit_code == 69
    runs = report_folder(path.parent / "out" / "res")
    assert duckdb.sql(f"SELECT exit_code FROM '{runs}/run-*.parquet'").fetchall() == [(69,)]
    assert not (path.parent / "out" / "res").exists()


@pytest.mark.slow
def test_experts_count_each_token_once(tmp_path: Path) -> None:
    """Not what was run to measure and to capture, nor the padding of graphs."""
    make_model_folder(tmp_path / "model", "qwen2_moe", seed=2)
    path = write_job(tmp_path / "job", tmp_path / "model", "none", max_num_seqs=4, max_num_batched_tokens=512)
    assert run(path, "build").exit_code == 0
    tables = report_folder(path.parent / "out" / "res")
    (padded, ran), *_ = duckdb.sql(
        f"SELECT sum(padded_tokens), sum(prefill_tokens + decode_tokens)::BIGINT FROM '{tables}/steps-*.parquet'"
    ).fetchall()
    loads = duckdb.sql(f"SELECT sum(tokens)::BIGINT FROM '{tables}/experts-*.parquet' GROUP BY layer")
    assert padded > 0
    assert loads.fetchall() == [(3 * ran,)] * 2
