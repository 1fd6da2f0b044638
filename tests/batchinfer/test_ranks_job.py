"""Tests an engine of several ranks: rows equal one process's, also after a rank dies, and no process remains."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers import replica
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.report.progress import Progress
from tests.batchinfer import dying_rank
from tests.batchinfer.pipeline.test_pipeline import people, run, table, write_job
from tests.batchinfer.test_replicas import report
from tests.batchinfer.wrong_jobs import alive, children
from tests.checkpoints import make_model_folder
from tests.examples import first_of
from tests.settings import has_cores

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
    pytest.mark.skipif(
        len(getattr(os, "sched_getaffinity", lambda _: (0, 1))(0)) < 2, reason="needs two cores"
    ),
]
FLOAT32 = ("model.dtype", "float32")
TENSOR, STAGES = "engine.tensor_parallel_size", "engine.pipeline_parallel_size"
EXPERTS = "engine.expert_parallel_size"
REAL = RunOptions(waves_from_s=float("inf"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
ASKED: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"frequency_penalty": 0.5},
]
ROWS, FEWER = 80, 24  # long enough to be killed at any moment; that it is several batches
SILENT_S = 2.0


ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return prompts of different lengths with a common prefix, more than run at once."""
    return [one | {"text": f"{one['text']} " * (1 + n % 7)} for n, one in enumerate(people(count))]


def job(folder: Path, model: Path, count: int = ROWS) -> Path:
    folder.mkdir()
    sampling = {"max_tokens": 24, "ignore_eos": True}
    return write_job(folder, model, rows_of(count), sampling=sampling, engine=ENGINE)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose stages have 2 and 3 layers. Every other layer has a window of 16 tokens and frees older
    blocks."""
    folder = tmp_path_factory.mktemp("windowed") / "model"
    make_model_folder(folder, "gemma3_text", num_hidden_layers=5, sliding_window=16)
    return folder


def asking_job(folder: Path, model: Path) -> Path:
    """Write a job whose rows have masks or log-probabilities of answers or prompts: each is a call of all
    ranks."""
    folder.mkdir()
    rows = [row | ASKED[number % len(ASKED)] for number, row in enumerate(rows_of(12))]
    sampling = {"max_tokens": 16, "from_columns": [name for one in ASKED for name in one]}
    tolerant = {"max_error_rate": 1.0}  # answers under a schema
    return write_job(folder, model, rows, sampling=sampling, engine=ENGINE, on_error=tolerant)


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, windowed: Path, warm_children: None
) -> list[dict[str, Any]]:
    """The answers of one process."""
    path = asking_job(tmp_path_factory.mktemp("alone") / "job", windowed)
    row = run(path, REAL, FLOAT32).row
    of_ranks = ("stage_wait_s", "collective_s", "rank_peak_rss_bytes", "rank_read_bytes")
    assert {row[name] for name in of_ranks} == {None}
    assert not [*path.parent.glob("out/*/ranks-*")]
    return table(path)


def ranks() -> list[int]:
    """Return the ids of the running rank processes of this process."""
    found = []
    for pid in children(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"workers.ranks.process:main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return alive(found)


@pytest.mark.parametrize("division", first_of((
    ({TENSOR: 2, STAGES: 2},), ({TENSOR: 2},), ({STAGES: 2},), ({TENSOR: 4},), ({STAGES: 2, "engine.max_num_seqs": 1},),
), 1))  # fmt: skip
def test_ranks_answer_as_one_process_does(
    tmp_path: Path, windowed: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    division: dict[str, int],
) -> None:  # fmt: skip
    has_cores(monkeypatch, 4)  # more ranks than there may be cores
    path = asking_job(tmp_path / "job", windowed)
    row = run(path, REAL, FLOAT32, *((name, str(size)) for name, size in division.items())).row
    assert_alike(table(path), alone)
    ranks_of = division.get(TENSOR, 1) * division.get(STAGES, 1)
    assert (row["exit_code"], row["ranks"], row["replicas"], row["worker_restarts"]) == (0, ranks_of, 1, 0)
    steps = report(path, "steps")
    assert {one["engine"] for one in steps} == {0}
    assert [one["step"] for one in steps] == list(range(len(steps)))
    assert ranks() == []


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 5])
def test_ranks_share_the_experts(tmp_path: Path, experts: int) -> None:
    """2 whole experts each, or half of each of 5."""
    make_model_folder(tmp_path / "model", "mixtral", num_local_experts=experts)
    found = []
    for name, options in (("alone", ()), ("shared", ((TENSOR, "2"),))):
        path = job(tmp_path / name, tmp_path / "model", FEWER)
        run(path, REAL, FLOAT32, *options)
        found.append(table(path))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("division", "more"), [
    ({EXPERTS: 2, STAGES: 2}, ()),
    ({EXPERTS: 2}, ()),
    ({EXPERTS: 4}, (("model.dtype", "bfloat16"),)),
    ({EXPERTS: 2}, (("model.quantization", "int8"),)),
    ({EXPERTS: 2, "engine.data_parallel": 2}, ()),
])  # fmt: skip
def test_ranges_of_experts_keep_the_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    division: dict[str, int],
    more: tuple[tuple[str, str], ...],
) -> None:
    """Sampled answers and log-probabilities."""
    has_cores(monkeypatch, 4)
    make_model_folder(tmp_path / "model", "mixtral", num_local_experts=4)
    sampling = (("sampling.temperature", "1.2"), ("sampling.logprobs", "2"), ("engine.deterministic", "true"))
    found = []
    for name, sizes in (("alone", {}), ("divided", division)):
        path = job(tmp_path / name, tmp_path / "model", FEWER)
        row = run(path, REAL, *sampling, *more, *((key, str(size)) for key, size in sizes.items())).row
        found.append([file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))])
        assert row["ranks"] == sizes.get(EXPERTS, 1) * sizes.get(STAGES, 1)
    assert found[0] == found[1]
    assert ranks() == []


@pytest.mark.parametrize(("at", "division", "how", "said"), [
    ("7", TENSOR, "SIGKILL", "rank 1 of 2 was killed (signal 9, SIGKILL)"),
    (dying_rank.LOADING, STAGES, "SIGSTOP", "because rank 1 of 2 made no progress"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("7", STAGES, "SIGSTOP", "made no progress"),
        ("7", STAGES, "memory", "rank 1 of 2: out of memory"),
        ("7", STAGES, "SIGKILL", "rank 1 of 2 was killed (signal 9, SIGKILL)"),
        ("7", TENSOR, "SIGABRT", "rank 1 of 2 ended by signal 6 (SIGABRT)"),
        (dying_rank.LOADING, TENSOR, "SIGKILL", "rank 1 of 2 was killed"),
        (dying_rank.LOADING, TENSOR, "SIGSTOP", "because rank 1 of 2 made no progress"),
    )),
])  # fmt: skip
def test_the_engine_restarts_and_names_the_lost_rank(
    tmp_path: Path, windowed: Path, alone: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    at: str, division: str, how: str, said: str,
) -> None:  # fmt: skip
    """After the rank's seventh step, or while it loads. After lost memory, the next engine runs smaller
    steps."""
    for name, value in (
        (dying_rank.AT, at),
        (dying_rank.HOW, how),
        (dying_rank.DIED, str(tmp_path / "died")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(replica, "LOADING_SILENT_S" if at == dying_rank.LOADING else "SILENT_S", SILENT_S)
    path, notices = asking_job(tmp_path / "job", windowed), list[str]()
    dying = replace(REAL, engine="tests.batchinfer.dying_rank:build")
    settings = load_job(path, (FLOAT32, (division, "2")))
    row = run_job(settings, dying, Progress(io.StringIO(), quiet=True), Interrupts(), notices.append).row
    assert (row["exit_code"], row["worker_restarts"]) == (0, 1)
    assert_alike(table(path), alone)
    assert any(said in notice for notice in notices)
    if at != dying_rank.LOADING:
        steps = [one for one in report(path, "steps") if one["engine"] == 1]
        tokens = max(one["prefill_tokens"] + one["decode_tokens"] for one in steps)
        assert (tokens <= 32) == (
            "memory" in said or "SIGKILL" in said
        )  # as which the kernel's killer is taken
    assert ranks() == []


@pytest.mark.slow
def test_three_stages_of_different_depths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven layers and three engines in turn, with 8 rows in total."""
    has_cores(monkeypatch, 4)
    make_model_folder(tmp_path / "deep", num_hidden_layers=7)
    found = []
    for stages in ("1", "3"):
        path = job(tmp_path / stages, tmp_path / "deep", FEWER)
        assert run(path, REAL, FLOAT32, (STAGES, stages)).exit_code == 0
        found.append(table(path))
        assert max(one["running"] for one in report(path, "steps")) <= 8
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("division", [TENSOR, STAGES])
def test_ranks_score_given_continuations(tmp_path: Path, model: Path, division: str) -> None:
    found = []
    for size in ("1", "2"):
        folder = tmp_path / size
        folder.mkdir()
        choices = {"choices": [" yes", " no", " not at all"]}
        path = write_job(folder, model, people(6), task="classify", classify=choices, sampling=None)
        assert run(path, REAL, FLOAT32, (division, size)).exit_code == 0
        found.append(table(path))
    assert_alike(*found)


def assert_alike(found: Any, wanted: Any) -> None:
    """Assert that both are equal, with a tolerance for floats: sums over ranks differ in their last bits."""
    floats: tuple[list[float], list[float]] = ([], [])
    assert _parted(found, floats[0]) == _parted(wanted, floats[1])
    assert floats[0] == pytest.approx(floats[1], abs=1e-3)


def _parted(value: Any, floats: list[float]) -> Any:
    """Return a value without its floats, which are appended to `floats`."""
    if isinstance(value, dict):
        return {key: _parted(one, floats) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_parted(one, floats) for one in value]
    if isinstance(value, float):
        floats.append(value)
        return None
    return value


@pytest.mark.slow
def test_stages_keep_the_bits(tmp_path: Path, model: Path) -> None:
    """Sampled answers and log-probabilities are equal in any batch."""
    found = []
    for number, stages in enumerate(("1", "2")):
        path = job(tmp_path / str(number), model, FEWER)
        sampling = (("sampling.temperature", "1.2"), ("sampling.logprobs", "2"))
        run(path, REAL, (STAGES, stages), ("engine.deterministic", "true"), *sampling)
        found.append([file.read_bytes() for file in sorted((path.parent / "out/res").glob("*.parquet"))])
    assert found[0] == found[1]
