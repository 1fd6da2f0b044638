"""Runs a real engine on a machine with known peaks, for tests of its report."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from batchinfer import cli
from batchinfer.machine.hardware import detect, remember
from batchinfer.pipeline import options
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer_kernels.cpu.build import cache_folder
from tests.batchinfer.wrong_jobs import Place, make_place

ROWS = 40  # different ones; every fourth is there twice
SHARED = "You are given a word of a language that nobody speaks any more, and say what it may have meant. "


def measured_run(folder: Path, model: Path) -> Place:
    """Run a job whose rows share a prefix."""
    place = make_place(folder / "job", model)
    texts = [f"word {i}" + " and more" * (i % 7) for i in range(ROWS)]
    texts += texts[::4]
    place.rows(*({"id": f"r{i}", "text": text} for i, text in enumerate(texts)))
    prompt = f'prompt: {{user: "{SHARED}{{{{ text }}}}"}}'
    place.job(prompt=prompt, model="model: {path: model, dtype: float32}")
    compiled = cache_folder()  # else the operators would be compiled again
    compiled.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        cache_folder().parent.mkdir(parents=True)
        cache_folder().symlink_to(compiled)
        remember(detect("cpu").measured({"float32": 1e10}, 1e10))
        patch.setattr(options, "RunOptions", partial(options.RunOptions, engine=ENGINE))
        assert cli._guarded(["run", str(place.folder / "job.yaml"), "-q"]) == 0
    return place
