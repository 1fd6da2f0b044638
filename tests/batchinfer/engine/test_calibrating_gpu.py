"""Tests calibration by an engine on a GPU, or in the interpreter without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from batchinfer.core.statistics.quality import Quality
from batchinfer.engine.config import CalibrationOrder, LoadConfig
from batchinfer.engine.load.int4 import calibrate_int4
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer_kernels.arithmetic import Device
from tests.batchinfer.engine.interpreted_gpu import stand_in
from tests.checkpoints import make_checkpoint

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 32}
FAMILIES = ("qwen3_moe", pytest.param("llama", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model") / "plain"
    make_checkpoint(folder, request.param, **SIZES, **(EXPERTS if request.param == "qwen3_moe" else {}))
    return folder


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch.setattr, compiles=False, quick=True)


def calibrate(
    model: Path, folder: Path, device: Device, answer_tokens: int = 0, prompts: int = 3
) -> tuple[Quality, list[int]]:
    """Write the folder. Return the loss, and the number of finished layers at each progress report."""
    folder.mkdir()
    draw, told = np.random.default_rng(3), list[int]()
    drawn = tuple(draw.integers(0, 260, 24).astype(np.int32) for _ in range(prompts))
    order = CalibrationOrder(LoadConfig(model, "float32", device), drawn, answer_tokens, folder, 32)
    loss = calibrate_int4(order, lambda done, _: told.append(done)).loss
    assert loss is not None
    return loss, told


def codes(folder: Path) -> dict[str, Tensor]:
    """Return the int4 values of the first layer by module."""
    first = load_file(folder / inspect_checkpoint(folder).files[0].name)
    packed = {name: words for name, words in first.items() if name.endswith("weight_packed")}
    return {
        name: torch.stack([words >> 4 * at & 15 for at in range(8)], -1) for name, words in packed.items()
    }


def test_a_gpu_makes_the_weights_of_a_cpu(model: Path, tmp_path: Path) -> None:
    """The inputs of the first layer are equal on both devices: only rounding differs, in a few values."""
    (lost, told), (wanted, _) = (calibrate(model, tmp_path / device, device) for device in ("cuda", "cpu"))
    assert told == [0, 0, 1, 2], "layers are counted from when the prompts are answered"
    here, there = codes(tmp_path / "cuda"), codes(tmp_path / "cpu")
    assert here.keys() == there.keys()
    assert len(here) >= 4
    same = sum(int((here[name] == there[name]).sum()) for name in here) / sum(
        map(Tensor.numel, here.values())
    )
    assert same > 0.99
    # A CPU rounds activations, too
    assert 0 < lost.kl < 1.2 * wanted.kl
    assert lost.positions == wanted.positions


def test_its_engine_answers_prompts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "llama", **SIZES | {"num_hidden_layers": 1})
    lost, _ = calibrate(tmp_path / "plain", tmp_path / "int4", "cuda", 3, prompts=3)
    assert lost.positions > 1
