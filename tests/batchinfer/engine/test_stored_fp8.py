"""Compares checkpoints that store fp8, multiplied by Triton, with the operators' references."""

from __future__ import annotations

import importlib.util
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer_kernels.arithmetic import WeightForm
from tests.batchinfer.engine.coded_references import CodedOps, forced
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import Limits
from tests.batchinfer.engine.teacher_forced import Row, farthest
from tests.checkpoints import kept_folder
from tests.kernels.gpu.float8_sums import float8_rounding
from tests.packed_weights import make_fp8

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

# Sizes that are no multiple of 128: fused parts begin within a block. Experts, latents, a part of a stored
# tensor.
SIZES = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blocks": ("llama", "block", SIZES),
    "blocks, parts of a tensor": ("phi3", "block", SIZES),
    "blocks of experts": ("qwen3_moe", "block", {**SIZES, "moe_intermediate_size": 136}),
    "blocks, latents": ("deepseek_v3", "block", {**SIZES, "moe_intermediate_size": 136}),
    "rows": ("qwen3", "row", {"num_hidden_layers": 1}),
    "tensors": ("llama", "tensor", {"num_hidden_layers": 1}),
}

DRAWN = random.Random(3)
ROWS = [Row([DRAWN.randrange(250) for _ in range(n)], [7, 8]) for n in (1, 9, 23)]


@cache
def folders(kind: str) -> tuple[Path, Path]:
    """Return the folders of the stored and the dequantised checkpoint."""
    family, each, sizes = KINDS[kind]
    made = kept_folder()
    make_fp8(made / "stored", made / "plain", family, each, block=128, **sizes)
    return made / "stored", made / "plain"


def stored(kind: str) -> Checkpoint:
    return inspect_checkpoint(folders(kind)[0]).keep_quantized()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind != "blocks" else []) for kind in KINDS]
)
def test_stored_fp8_products_equal_their_references(kind: str) -> None:
    model, plain = stored(kind), inspect_checkpoint(folders(kind)[1])
    wanted, got, dequantised = (
        forced(each, ops, DEVICE, rows=ROWS)
        for each, ops in ((model, CodedOps()), (model, triton_ops(model)), (plain, TorchOps()))
    )
    off, unquantised = farthest(got, wanted), farthest(dequantised, wanted)
    half = len(off) // 2
    assert off[half] < (unquantised[half] / 4 if float8_rounding() > 0 else 1e-5)
    assert off[-1] < unquantised[half] / 2, "further away than activations that are not coded"
    deviation = torch.stack([got[place] - dequantised[place] for place in dequantised]).std()
    assert deviation < 0.25 * torch.stack(list(dequantised.values())).std(), (
        "another model than the dequantised one"
    )


@pytest.mark.parametrize("kind", ["blocks", pytest.param("blocks of experts", marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_a_batch(kind: str) -> None:
    model = stored(kind)
    ops = triton_ops(model, deterministic=True)
    alone = forced(model, ops, DEVICE, Limits(budget=4096, seqs=1, caching=False))
    together = forced(model, ops, DEVICE, Limits(budget=24))
    assert all(torch.equal(together[place], alone[place]) for place in alone)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_values_and_scales_give_the_dequantised_weights(kind: str) -> None:
    """Fused weights, experts, and parts of a tensor."""
    model, plain = stored(kind), inspect_checkpoint(folders(kind)[1])
    read, whole = (CheckpointWeights(each, torch.float32, "cpu") for each in (model, plain))
    for index, spec in enumerate(model.spec.layers):
        codes, wanted = read.layer(index), whole.layer(index)
        coded = [linear for linear in spec.linears if linear.stored]
        assert {linear.name for linear in coded} == {name for name, _ in spec.forms}
        assert len(coded) >= 2
        for linear in coded:
            found = codes[linear.name].float()
            scales = codes[linear.name + ".scales"]
            if linear.form is not None and linear.form.scales == "channel":
                spread = scales[:, None]
            else:
                lines = codes[linear.name + ".lines"].long()
                spread = scales[lines].repeat_interleave(128, 1)[:, : found.shape[1]]
            assert torch.equal(found * spread, wanted[linear.name])
        others = wanted.keys() - {linear.name for linear in coded}
        assert all(torch.equal(codes[name], wanted[name]) for name in others)


def test_quantised_weights_of_a_checkpoint_stay_quantised() -> None:
    """Floats of the checkpoint, and products with a float part, are computed in the job's dtype."""
    kind = "blocks"
    model, source = stored(kind), checkpoint_source(folders(kind)[0], quantization="stored")
    first, second = (dict(layer.forms) for layer in model.spec.layers)
    blocks = WeightForm("fp8", "block", stored=True)
    assert first == dict.fromkeys(("qkv", "gate_up", "down"), blocks)
    assert second == {**first, "o": blocks}
    (notice,) = model.notices
    assert "stay in fp8 as they are stored" in notice
    assert isinstance(source, ModelSource)
    cost = model.cost(2)
    coded = sum(linear.values for linear in model.spec.linears() if linear.stored)
    assert cost.quantized
    assert source.weight_bytes(cost) == 2 * model.parameters - coded
    plain = inspect_checkpoint(folders(kind)[0]).cost(2)
    assert not plain.quantized
    ran, dequantised = ({operator.name: operator for operator in each.operators} for each in (cost, plain))
    assert ran["qkv"].token.coded_ops == dequantised["qkv"].token.flops
    assert ran["qkv"].step.bytes < 0.6 * dequantised["qkv"].step.bytes


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_other_widths_are_dequantised(tmp_path: Path, block: int) -> None:
    make_fp8(tmp_path / "stored", tmp_path / "plain", "llama", block=block, **SIZES)
    found = inspect_checkpoint(tmp_path / "stored")
    assert found.stored_quantization == ("stored" if block == 128 else "none")
    assert ("dequantised" in found.keep_quantized().notices[0]) == (block != 128)
    assert inspect_checkpoint(tmp_path / "plain").stored_quantization == "none"
