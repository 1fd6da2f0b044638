"""Products of weights that a checkpoint stores in int8, as they are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.ops.cpu_layer import CompiledLayer
from batchinfer.models.ops.interface import CodedWeight, Linear, Ops, RopeTable, Weight, values_of
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.quantized_linear import quantized_linear_reference
from tests.batchinfer.engine.interpreted_gpu import DEVICE, ReferenceLinear, triton_ops
from tests.batchinfer.engine.small_engine import (
    TRITON,
    Limits,
    Place,
    cpu_ops,
    make_runner,
)
from tests.batchinfer.engine.teacher_forced import Row, farthest, forced_logits
from tests.checkpoints import kept_folder
from tests.packed_weights import SINGLE
from tests.published_formats import make_published

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INT8 = WeightForm("int8", stored=True)


@cache
def folder() -> Path:
    """One with a code that int8 has and we never make, -128."""
    made = kept_folder()
    make_published(made / "stored", made / "plain", "w8a8")
    stored = load_file(made / "stored" / SINGLE)
    stored["model.layers.1.mlp.up_proj.weight"][0, 0] = -128
    save_file(stored, made / "stored" / SINGLE, metadata={"format": "pt"})
    return made / "stored"


def stored() -> Checkpoint:
    return inspect_checkpoint(folder()).as_stored()


class StoredOps(TorchOps):
    """torch's operators, with products of int8 as their reference has them."""

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        if not isinstance(weight, CodedWeight):
            return super().pack_linear(values_of(weight, self.name), bias)
        codes, scales = weight.codes, weight.scales
        return ReferenceLinear(codes.shape, lambda x: quantized_linear_reference(x, codes, scales, bias))


def forced(model: Checkpoint, ops: Ops, device: str) -> dict[Place, Tensor]:
    """Logits of answers that are given."""
    limits, rows = Limits(budget=32), [Row([3, 17, 99, 4, 200], [7, 8]), Row([5] * 20, [9, 1])]
    return forced_logits(make_runner(model, ops, limits, device), limits, rows)[0]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=TRITON)])
def test_stored_codes_are_multiplied_as_their_reference_says(kind: str) -> None:
    model, plain = stored(), inspect_checkpoint(folder())
    ops, device = (cpu_ops(model), "cpu") if kind == "cpu" else (triton_ops(model), DEVICE)
    got, wanted = forced(model, ops, device), forced(model, StoredOps(), device)
    off, unquantised = farthest(got, wanted), farthest(forced(plain, TorchOps(), "cpu"), wanted)
    assert off[len(off) // 2] < 1e-5 < unquantised[0]
    assert off[-1] < unquantised[len(off) // 2] / 2


def test_what_stays_in_int8() -> None:
    """What the checkpoint leaves in floats is computed in the job's dtype, in the same compiled layer."""
    model = stored()
    first, second = (dict(layer.forms) for layer in model.spec.layers)
    assert first == dict.fromkeys(("qkv", "gate_up", "down"), INT8)
    assert second == {**first, "o": INT8}
    (notice,) = model.notices
    assert "stay in int8 as they are stored" in notice
    read = CheckpointWeights(model, torch.float32, "cpu").layer(1)
    assert (read["gate_up"].dtype, int(read["gate_up"].min())) == (torch.int8, -128)
    source = checkpoint_source(folder(), quantization="stored-int8")
    assert isinstance(source, ModelSource)
    ops = cpu_ops(model)
    assert source.computed_by(ops)[1].startswith("int8")
    rope = RopeTable(torch.ones(1, 8), torch.ones(1, 8))
    weights = CheckpointWeights(model, torch.float32, "cpu")
    layers = (pack_layer(ops, spec, weights.layer(at), rope) for at, spec in enumerate(model.spec.layers))
    assert all(map(CompiledLayer.covers, model.spec.layers, layers))
