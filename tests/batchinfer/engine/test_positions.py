"""Tests that the rotary table has the length of the job's longest row, and that nothing reads past its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.load.build import load_model
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs
from batchinfer_kernels.step_tables import StepTables
from tests.batchinfer.engine.small_engine import drain, greedy
from tests.checkpoints import edit_json, make_checkpoint

PROMPT = [5, 17, 200, 3, 44]


def config(folder: Path, longest: int) -> EngineConfig:
    return EngineConfig(
        LoadConfig(folder, "float32", "cpu", threads=1),
        max_model_len=2_000_000_000,
        longest=longest,
        max_num_seqs=4,
    )


@pytest.fixture
def promising(tmp_path: Path) -> Path:
    """Return a checkpoint with 2 billion positions, whose rotary table once took 274 GB."""
    make_checkpoint(tmp_path, "llama", seed=5)
    edit_json(tmp_path / "config.json", max_position_embeddings=2_000_000_000)
    return tmp_path


def answer(folder: Path, longest: int, most: int) -> list[int]:
    engine = load_model(config(folder, longest)).engine()
    return drain(engine, greedy([PROMPT], most, ignore_eos=True)).tokens(0)


def test_the_rotary_table_has_the_length_of_the_longest_row(promising: Path) -> None:
    loaded = load_model(config(promising, 40))
    assert isinstance(loaded.runner.model, Decoder)
    assert loaded.runner.model.max_positions == 40
    small = load_model(replace(config(promising, 40), max_model_len=30)).runner.model
    assert isinstance(small, Decoder)
    assert small.max_positions == 30


def test_a_row_may_fill_the_table_and_ends_with_it(promising: Path) -> None:
    whole = answer(promising, 400, 12)
    assert answer(promising, len(PROMPT) + 12, 12) == whole
    assert answer(promising, len(PROMPT) + 3, 12) == whole[:3]


def test_a_prompt_that_leaves_no_position_is_refused(promising: Path) -> None:
    with pytest.raises(
        ValueError, match="a prompt of 5 tokens leaves no room for an answer: there are 5 positions"
    ):
        answer(promising, 5, 12)


def test_no_step_reads_past_the_rotary_table(promising: Path) -> None:
    runner = load_model(config(promising, 40)).runner
    tables = np.zeros((1, 3), np.int32)
    places = (torch.tensor([40]), torch.tensor([0]), torch.from_numpy(tables))
    inputs = AttentionInputs(*places, [1], [41], StepTables.of(tables))
    with pytest.raises(ValueError, match="a context of 41 tokens, and 40 positions"):
        runner.model.forward(torch.tensor([1]), [inputs], runner.caches, [])
