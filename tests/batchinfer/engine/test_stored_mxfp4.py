"""Compares experts stored in MXFP4 with the dequantised model, bit by bit on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.config import load_config
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.ops.attention import RopeTable
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer.models.spec.parameters import parameter_count
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.tiles import TileWay
from tests.batchinfer.engine.coded_references import forced
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import TRITON, cpu_ops
from tests.batchinfer.engine.teacher_forced import farthest
from tests.checkpoints import kept_folder
from tests.packed_weights import make_mxfp4
from tests.published_formats import make_published

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FORM = WeightForm("mxfp4", "group", stored=True, group=32)


@cache
def folders() -> tuple[Path, Path]:
    """Return the folders of the stored checkpoint, and of the one dequantised by transformers."""
    made = kept_folder()
    make_mxfp4(made / "stored", made / "plain")
    return made / "stored", made / "plain"


def stored() -> Checkpoint:
    return inspect_checkpoint(folders()[0]).for_quantization("stored-mxfp4")


def test_a_cpu_gives_the_dequantised_models_bits() -> None:
    model, plain = stored(), inspect_checkpoint(folders()[1])
    got, wanted = (forced(each, cpu_ops(each), "cpu") for each in (model, plain))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[place], wanted[place]) for place in wanted)


@TRITON
def test_a_gpu_computes_the_dequantised_model() -> None:
    model, plain = stored(), inspect_checkpoint(folders()[1])
    got, wanted = forced(model, triton_ops(model), DEVICE), forced(plain, TorchOps(), DEVICE)
    assert farthest(got, wanted)[-1] < 2e-5


@cache
def linears() -> tuple[Path, Path]:
    """Return folders of a stored and a plain model with MXFP4 linear layers, except for one o_proj."""
    made = kept_folder()
    make_published(made / "stored", made / "plain", "mxfp4 of linear layers")
    return made / "stored", made / "plain"


@pytest.mark.parametrize("tiles", ["none", "emulated"])
def test_linear_layers_of_a_cpu_have_the_dequantised_models_bits(tiles: TileWay) -> None:
    """Compiled layers dequantise them inside, other layers operator by operator, with one order of sums."""
    model, plain = (
        inspect_checkpoint(linears()[0]).for_quantization("stored-mxfp4"),
        inspect_checkpoint(linears()[1]),
    )
    assert [len(layer.forms) for layer in model.spec.layers] == [3, 4]
    (notice,) = model.notices
    assert "stay in mxfp4 as they are stored" in notice
    compiled = CompiledOperators(tiles=tiles)
    ops = [CpuOps(compiled, each.spec.attention.group) for each in (model, plain)]
    got, wanted = (forced(each, made, "cpu") for each, made in zip((model, plain), ops, strict=True))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[place], wanted[place]) for place in wanted)
    weights = CheckpointWeights(model, torch.bfloat16, "cpu").layer(1)
    rope = RopeTable(torch.ones(1, 8), torch.ones(1, 8))
    parts, dtypes = pack_layer(ops[0], model.spec.layers[1], weights, rope), (torch.float32, torch.bfloat16)
    fused = [
        CpuOps(compiled, 2, dtype=dtype).fuse(model.spec.layers[1], parts) is not None for dtype in dtypes
    ]
    assert fused == [True, tiles == "none"]


@TRITON
def test_linear_layers_of_a_gpu_compute_the_dequantised_model() -> None:
    model, plain = (
        inspect_checkpoint(linears()[0]).for_quantization("stored-mxfp4"),
        inspect_checkpoint(linears()[1]),
    )
    got, wanted = forced(model, triton_ops(model), DEVICE), forced(plain, TorchOps(), DEVICE)
    assert farthest(got, wanted)[-1] < 2e-5


def test_memory_of_linear_layers_in_mxfp4() -> None:
    small, large = (checkpoint_source(linears()[0], quantization=how) for how in ("stored-mxfp4", "none"))
    assert isinstance(small, ModelSource)
    assert isinstance(large, ModelSource)
    model = inspect_checkpoint(linears()[0]).for_quantization("stored-mxfp4")
    cost, plain = model.cost(2), inspect_checkpoint(linears()[0]).cost(2)
    coded = sum(linear.values for linear in model.spec.linears() if linear.stored)
    assert large.weight_bytes(plain) - small.weight_bytes(cost) == coded * 2 - coded * 17 // 32
    ran, dequantised = ({each.name: each for each in one.operators} for one in (cost, plain))
    assert ran["down"].token == dequantised["down"].token
    assert ran["down"].step.bytes * 64 == dequantised["down"].step.bytes * 17


def test_weights_that_stay_in_mxfp4_and_their_memory() -> None:
    whole = inspect_checkpoint(folders()[0])
    assert whole.stored_quantization == "stored-mxfp4"
    model = stored()
    for layer in model.spec.layers:
        assert dict(layer.forms) == {"experts.gate_up": FORM, "experts.down": FORM}
    (notice,) = model.notices
    assert "stay in mxfp4 as they are stored" in notice
    small, large = (checkpoint_source(folders()[0], quantization=how) for how in ("stored-mxfp4", "none"))
    assert isinstance(small, ModelSource)
    assert isinstance(large, ModelSource)
    cost, plain = model.cost(2), whole.cost(2)
    experts = sum(linear.values for linear in model.spec.linears() if linear.experts)
    assert large.weight_bytes(plain) - small.weight_bytes(cost) == experts * 2 - experts * 17 // 32
    ran, dequantised = ({each.name: each for each in one.operators} for one in (cost, plain))
    assert ran["experts.down"].token == dequantised["experts.down"].token
    assert ran["experts.down"].expert.bytes * 64 == dequantised["experts.down"].expert.bytes * 17


def test_memory_of_gpt_oss_20b(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201_088}
    raw = json.loads((folders()[1] / "config.json").read_text())
    del raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, **sizes, **heads, "tie_word_embeddings": False}))
    plain = load_config(tmp_path)
    coded = (("experts.gate_up", FORM), ("experts.down", FORM))
    small = replace(plain, layers=tuple(replace(layer, forms=coded) for layer in plain.layers))
    taken = []
    for spec in (small, plain):
        source = ModelSource(spec, parameter_count(spec), lambda *_: pytest.fail("nothing is read"))
        taken.append(source.weight_bytes(source.cost(Arithmetic(torch.bfloat16, torch.device("cpu")))))
    assert [round(size / 2**30, 1) for size in taken] == [12.8, 39.0]


def test_weights_are_quantised_again_for_another_format() -> None:
    """The values are dequantised; scales of their own groups are lost."""
    model = inspect_checkpoint(folders()[0]).for_quantization("int8")
    assert not model.spec.forms
    assert {form.codes for form in model.spec.quantized("int8").forms} == {"int8"}
