"""How fast the pipeline around an engine is, with an engine that takes no time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.batchinfer.test_pipeline import FAKE, run, write_job
from tests.checkpoints import make_model_folder


def rows_per_second(folder: Path, rows: int) -> tuple[float, dict[str, float]]:
    """A whole job of short rows, from reading to publishing; model checks and process starts included."""
    make_model_folder(folder / "model", "llama")
    text = "".join(json.dumps({"id": i, "text": f"customer {i} writes"}) + "\n" for i in range(rows))
    (folder / "in.jsonl").write_text(text)
    output = {"path": "out/res", "columns": ["id"]}
    path = write_job(folder, folder / "model", None, sampling={"max_tokens": 4}, output=output)
    began = time.perf_counter()
    outcome = run(path, FAKE)
    seconds = time.perf_counter() - began
    assert outcome.row["rows_ok"] == rows
    phases = {k: round(outcome.row[f"{k}_s"], 2) for k in ("ingest", "plan", "load", "engine", "publish")}
    return rows / seconds, phases


@pytest.mark.slow
def test_the_pipeline_passes_ten_thousand_rows_a_second(tmp_path):
    """On a machine that does nothing else; prints what was measured."""
    speed, phases = rows_per_second(tmp_path, 300_000)
    print(f"{speed:,.0f} rows/s {phases}")
    assert speed >= 10_000
