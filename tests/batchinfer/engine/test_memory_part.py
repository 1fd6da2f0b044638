"""Several engines share a CPU's memory: the weights come out of each one's part, and the cache out of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.core.errors import OutOfMemory
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.kv.memory import CPU_FRACTION
from batchinfer.engine.load.build import load_model
from tests.checkpoints import make_checkpoint

CACHE = 1 << 18


def test_an_engine_takes_no_more_than_its_part(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", seed=5)
    config = EngineConfig(LoadConfig(tmp_path, "float32", "cpu", threads=1), max_model_len=64, longest=64)
    whole = load_model(config).info
    part = whole.weight_bytes + CACHE
    info = load_model(replace(config, memory=part)).info
    assert CACHE * CPU_FRACTION * 0.8 < info.kv_bytes <= CACHE * CPU_FRACTION
    assert info.kv_bytes < whole.kv_bytes
    assert load_model(replace(config, memory=part << 10)).info.kv_bytes == whole.kv_bytes
    with pytest.raises(OutOfMemory):
        load_model(replace(config, memory=whole.weight_bytes // 2))
