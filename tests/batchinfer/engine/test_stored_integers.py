"""Tests products of weights that a checkpoint stores in int8 and int4."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.ops.attention import RopeTable
from batchinfer.models.ops.cpu_layer import CompiledLayer
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer_kernels.arithmetic import WeightForm
from tests.batchinfer.engine.coded_references import CodedOps, ValueOps, forced
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import (
    TRITON,
    cpu_ops,
)
from tests.batchinfer.engine.teacher_forced import farthest
from tests.checkpoints import kept_folder
from tests.packed_weights import SINGLE
from tests.published_formats import make_published

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INT8 = WeightForm("int8", stored=True)


@cache
def folder() -> Path:
    """Return a checkpoint with the int8 value -128, which our quantisation never produces."""
    made = kept_folder()
    make_published(made / "stored", made / "plain", "w8a8")
    stored = load_file(made / "stored" / SINGLE)
    stored["model.layers.1.mlp.up_proj.weight"][0, 0] = -128
    save_file(stored, made / "stored" / SINGLE, metadata={"format": "pt"})
    return made / "stored"


def stored() -> Checkpoint:
    return inspect_checkpoint(folder()).keep_quantized()


@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=TRITON)])
def test_stored_integer_products_equal_their_reference(kind: str) -> None:
    model, plain = stored(), inspect_checkpoint(folder())
    ops, device = (cpu_ops(model), "cpu") if kind == "cpu" else (triton_ops(model), DEVICE)
    got, wanted = forced(model, ops, device), forced(model, CodedOps(), device)
    off, unquantised = farthest(got, wanted), farthest(forced(plain, TorchOps(), "cpu"), wanted)
    assert off[len(off) // 2] < 1e-5 < unquantised[0]
    assert off[-1] < unquantised[len(off) // 2] / 2


def test_weights_that_stay_in_int8() -> None:
    """Floats of the checkpoint are computed in the job's dtype within the compiled layer."""
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
    assert all(map(CompiledLayer.covers, model.spec.layers, layers, [False] * 2))


@pytest.mark.parametrize("name", ["gptq", "gptq without groups", "awq", "w4a16", "w4a16 with zeros"])
def test_int4_is_multiplied_as_it_is_stored(tmp_path: Path, name: str) -> None:
    """Values and scales give the dequantised weights. Int4 layouts that a CPU does not support become int8."""
    make_published(tmp_path / "stored", tmp_path / "plain", name)
    whole = inspect_checkpoint(tmp_path / "stored")
    model = whole.for_quantization("int4")
    plain, read = (CheckpointWeights(each, torch.float32, "cpu").layer(1) for each in (whole, model))
    coded = [linear for linear in model.spec.layers[1].linears if linear.stored]
    assert len(coded) >= 2
    for linear in coded:
        assert linear.form is not None
        codes, scales = read[linear.name].float(), read[linear.name + ".scales"]
        zeros = read.get(linear.name + ".zeros", torch.zeros_like(scales))
        groups = torch.arange(codes.shape[1]) // linear.form.group
        assert (int(codes.min()), int(codes.max())) == (-8, 7)
        found = (codes - zeros[:, groups]) * scales[:, groups]
        torch.testing.assert_close(found, plain[linear.name], rtol=1e-6, atol=1e-7)
    quantised = replace(model, spec=model.spec.quantized("int4"))
    assert {form.codes for form in quantised.spec.forms} == {"int4", "int8"}
    got, wanted = (forced(quantised, ops, "cpu") for ops in (cpu_ops(quantised), CodedOps()))
    off = farthest(got, wanted)
    unquantised = farthest(forced(whole, TorchOps(), "cpu"), wanted)
    assert off[len(off) // 2] < 2e-5 < unquantised[0]
    assert off[-1] < unquantised[len(off) // 2] / 2


@pytest.mark.sample(2)
@TRITON
@pytest.mark.parametrize("many", [1, 1 << 20])
@pytest.mark.parametrize("name", ["gptq", "w4a16 with zeros", "awq"])
def test_a_gpu_multiplies_int4_as_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, many: int
) -> None:
    """Activations are not quantised: logits equal the dequantised model's, with and without the panel. Only
    the head is in int8."""
    from batchinfer.models.ops import gpu_linear

    monkeypatch.setattr(gpu_linear, "least_panel_rows", lambda *_, **__: many)
    make_published(tmp_path / "stored", tmp_path / "plain", name)
    whole = inspect_checkpoint(tmp_path / "stored")
    model = whole.for_quantization("int4")
    model = replace(model, spec=model.spec.quantized("int4"))
    got, wanted = forced(model, triton_ops(model), DEVICE), forced(model, ValueOps(), DEVICE)
    off, plain = farthest(got, wanted), farthest(forced(whole, TorchOps(), "cpu"), wanted)
    assert off[-1] < 2e-5 < plain[0]
    head = replace(whole, spec=replace(whole.spec, head_form=model.spec.head_form))
    kept = sum(linear.values for linear in model.spec.linears() if linear.stored)
    if kept == sum(linear.values for linear in model.spec.linears()):
        assert farthest(got, forced(head, ValueOps(), DEVICE))[-1] < 2e-5


@TRITON
def test_unsupported_groups_on_a_gpu_are_refused_with_the_remedy() -> None:
    from batchinfer.core.errors import Unavailable
    from batchinfer.models.ops.choose import choose_ops

    forms = frozenset({WeightForm("int4", "group", stored=True, group=48)})
    with pytest.raises(
        Unavailable, match=r"groups of 48 inputs.*multiple of 32; use model.quantization: none"
    ):
        choose_ops(torch.device("cuda"), torch.float32, 1, 64, forms=forms)
    forms = frozenset({WeightForm("int4", "group", stored=True, group=32, whole_zeros=False)})
    with pytest.raises(Unavailable, match=r"zeros between codes.*use model.quantization: none"):
        choose_ops(torch.device("cuda"), torch.float32, 1, 64, forms=forms)


def test_fused_products_with_a_float_part_are_dequantised(tmp_path: Path) -> None:
    make_published(tmp_path / "stored", tmp_path / "plain", "w8a8")
    stored, plain = (load_file(tmp_path / name / SINGLE) for name in ("stored", "plain"))
    k = "model.layers.1.self_attn.k_proj.weight"
    del stored[k + "_scale"]
    save_file(stored | {k: plain[k]}, tmp_path / "stored" / SINGLE, metadata={"format": "pt"})
    model = inspect_checkpoint(tmp_path / "stored").keep_quantized()
    assert dict(model.spec.layers[1].forms) == dict.fromkeys(("o", "gate_up", "down"), INT8)
    found, wanted = (
        CheckpointWeights(each, torch.float32, "cpu").layer(1)["qkv"]
        for each in (model, inspect_checkpoint(tmp_path / "plain"))
    )
    assert torch.equal(found, wanted)
