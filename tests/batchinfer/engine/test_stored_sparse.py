"""Tests 2:4 sparse checkpoints: with their zeros on a CPU, compressed on a GPU with a fake cuSPARSELt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer.plan.setup.weights import can_calibrate
from batchinfer_kernels.arithmetic import WeightForm
from tests.batchinfer.engine.coded_references import forced
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import TRITON
from tests.batchinfer.engine.teacher_forced import farthest
from tests.batchinfer.models.ops.cusparselt_stand_in import stand_in
from tests.checkpoints import edit_json
from tests.packed_weights import SINGLE
from tests.published_formats import make_published, sparsity

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORM = WeightForm("sparse", stored=True)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the folders of checkpoints with masks and with zeros; o_proj of layer 0 has no zeros."""
    make_published(tmp_path / "stored", tmp_path / "plain", "2:4 sparse")
    return tmp_path / "stored", tmp_path / "plain"


@TRITON
@pytest.mark.parametrize("with_zeros", [False, True])
def test_a_gpu_leaves_out_the_zeros(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, with_zeros: bool
) -> None:
    library = stand_in(monkeypatch, (torch.float32,))
    stored, plain = folders
    if with_zeros:
        make_dense(folders)
        stored = plain
    model = inspect_checkpoint(stored).for_quantization("stored-sparse")
    dense = inspect_checkpoint(plain)
    got, wanted = forced(model, triton_ops(model), DEVICE), forced(dense, TorchOps(), DEVICE)
    assert farthest(got, wanted)[-1] < 2e-5
    assert library.products % 7 == 0, "four products of layer 1, and three of layer 0"
    assert library.products > 0


def make_dense(folders: tuple[Path, Path]) -> None:
    """Replace the config of sparsity in the dequantised checkpoint."""
    edit_json(folders[1] / "config.json", quantization_config=sparsity("dense"))


def test_weights_that_stay_sparse_and_their_memory(folders: tuple[Path, Path]) -> None:
    whole = inspect_checkpoint(folders[0])
    assert whole.stored_quantization == "stored-sparse"
    model = whole.for_quantization("stored-sparse")
    sparse = [[name for name, form in layer.forms if form == FORM] for layer in model.spec.layers]
    assert sparse == [["qkv", "gate_up", "down"], ["qkv", "o", "gate_up", "down"]]
    (notice,) = model.notices
    assert "% of the weights of linear layers stay in 2:4 sparse as they are stored" in notice
    found = [checkpoint_source(folders[0], quantization=how) for how in ("stored-sparse", "none")]
    small, large = (source for source in found if isinstance(source, ModelSource))
    cost, plain = model.cost(2), whole.cost(2)
    kept = sum(linear.values for linear in model.spec.linears() if linear.form == FORM)
    assert large.weight_bytes(plain) - small.weight_bytes(cost) == kept * 2 - kept * 9 // 8
    ran, dense = ({each.name: each for each in one.operators} for one in (cost, plain))
    assert ran["down"].token.flops * 2 == dense["down"].token.flops
    assert ran["down"].step.bytes * 16 == dense["down"].step.bytes * 9


def test_a_checkpoint_with_its_zeros_is_one_of_floats_elsewhere(folders: tuple[Path, Path]) -> None:
    before = inspect_checkpoint(folders[1])
    make_dense(folders)
    found = inspect_checkpoint(folders[1])
    assert (found.notices, found.plain, can_calibrate(found)) == (before.notices, True, True)
    assert not can_calibrate(inspect_checkpoint(folders[0]))
    assert found.stored_quantization == "stored-sparse"
    assert found.parameters == before.parameters
    weights = [CheckpointWeights(each, torch.bfloat16, "cpu").layer(1) for each in (before, found)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_old_checkpoints_state_sparsity_under_another_key(folders: tuple[Path, Path]) -> None:
    stated = sparsity("sparse-24-bitmask")
    edit_json(folders[0] / "config.json", quantization_config=..., compression_config=stated)
    assert inspect_checkpoint(folders[0]).stored_quantization == "stored-sparse"


@pytest.mark.parametrize(("name", "what"), [("2:4 sparse", "two of each four inputs"), ("sparse", " values")])
def test_a_mask_that_does_not_match_its_values_is_refused(tmp_path: Path, name: str, what: str) -> None:
    make_published(tmp_path / "stored", tmp_path / "plain", name)
    stored, mask = load_file(tmp_path / "stored" / SINGLE), "model.layers.1.mlp.up_proj.bitmask"
    stored[mask][0, 0] ^= 1
    save_file(stored, tmp_path / "stored" / SINGLE, metadata={"format": "pt"})
    weights = CheckpointWeights(inspect_checkpoint(tmp_path / "stored"), torch.float32, "cpu")
    with pytest.raises(JobFileError, match=f"{mask} does not mark .*{what}"):
        weights.layer(1)
