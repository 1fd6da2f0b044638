"""A calibration on another device than the host's: no operator gets tensors of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.models.calibration.folder import CalibratedFolder
from batchinfer.models.calibration.search import Search
from batchinfer.models.calibration.work import Loss
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from tests.batchinfer.engine.interpreted_gpu import ValueOps
from tests.batchinfer.far_device import FAR, far_away
from tests.batchinfer.models.test_calibrated_folder import FAMILIES, SIZES, sequences
from tests.checkpoints import make_checkpoint
from tests.examples import first_of


def calibrate(model: Path, folder: Path, device: torch.device) -> Loss:
    checkpoint, samples = inspect_checkpoint(model), (sequences(3, 1, 16), sequences(2, 2, 16))
    folder.mkdir()
    search = Search(checkpoint, ValueOps(), torch.float32, samples, device, marks=True)
    written = CalibratedFolder(folder, checkpoint, 32, True)
    for index, layer in enumerate(search.layers()):
        written.add(index, layer)
    written.finish()
    loss = search.loss()
    assert loss is not None
    return loss


@pytest.mark.parametrize(
    ("family", "layers"), first_of([("qwen2_moe", 1), ("gemma3_text", 2), ("llama", 2)], 1)
)
def test_nothing_of_it_is_left_on_the_host(tmp_path: Path, family: str, layers: int) -> None:
    make_checkpoint(tmp_path / "plain", family, **{**SIZES, **FAMILIES[family], "num_hidden_layers": layers})
    near = calibrate(tmp_path / "plain", tmp_path / "near", torch.device("cpu"))
    with far_away():
        far = calibrate(tmp_path / "plain", tmp_path / "far", FAR)
    assert far.kl == pytest.approx(near.kl, rel=1e-2)
    assert (far.same, far.tokens) == (near.same, near.tokens)
