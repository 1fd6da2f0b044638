"""Measuring a run costs less than a hundredth of its time. Takes 30 s, since start and end dominate shorter runs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import duckdb
import pytest
import torch

from batchinfer import cli
from batchinfer.pipeline import options
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.report.tables.folder import tables
from tests.batchinfer.wrong_jobs import make_place
from tests.checkpoints import make_model_folder

ROWS = 48
LAYERS = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
MOST = 0.01


@pytest.mark.slow
def test_metering_takes_less_than_a_hundredth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a Llama with 135M weights. Counts the time that the engine and the driver sum up themselves."""
    make_model_folder(tmp_path / "model", "llama", tied=True, dtype=torch.bfloat16, **LAYERS)
    place, rng = make_place(tmp_path / "job", tmp_path / "model"), random.Random(1)
    texts = (
        "all alike " * 24 + "".join(rng.choices("abcdefgh ", k=rng.randint(16, 700))) for _ in range(ROWS)
    )
    place.rows(*({"id": f"r{i}", "text": text} for i, text in enumerate(texts)))
    place.job(sampling="sampling: {max_tokens: 48, ignore_eos: true}")
    monkeypatch.setattr(options, "RunOptions", partial(options.RunOptions, engine=ENGINE))
    assert cli._guarded(["run", str(place.folder / "job.yaml"), "-q"]) == 0
    (file,) = tables(place.results.with_name("res-report"), "run")
    columns = "metering_s, wall_s, wall_load_s + wall_input_s + wall_device_s + wall_host_s + wall_output_s"
    metering_s, wall_s, parts = duckdb.sql(f"SELECT {columns} FROM '{file}'").fetchall()[0]
    print(f"metering took {metering_s:.3f} s of {wall_s:.1f} s: {metering_s / wall_s:.2%}")
    assert 0 < metering_s < MOST * wall_s
    assert parts == pytest.approx(wall_s, rel=0.01)
