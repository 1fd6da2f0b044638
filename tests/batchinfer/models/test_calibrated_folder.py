"""Tests a calibrated checkpoint: its content, its results, and their distance to the original model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchinfer.core.statistics.quality import Quality
from batchinfer.models.adapters.channel_factors import ChannelFactors
from batchinfer.models.calibration.folder import CalibratedFolder
from batchinfer.models.calibration.layer import RoundedLayer
from batchinfer.models.calibration.sample import SampleRows
from batchinfer.models.calibration.search import Search
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer_kernels.int4_feedback import round_with_feedback
from tests.batchinfer.engine.coded_references import ValueOps
from tests.batchinfer.engine.small_engine import cpu_ops, quantized
from tests.batchinfer.far_device import FAR, far_away
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import edit_json, make_checkpoint
from tests.examples import first_of
from tests.packed_weights import SINGLE

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
VOCAB = 260
GATE_UP, DOWN = "experts.gate_up", "experts.down"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tied": True, "dtype": torch.bfloat16},
    "gemma3_text": {},
    "phi3": {},
    "cohere": {},
    "gpt_neox": {},
    "stablelm": {"qk_layernorm": True},  # each head's norm is a tensor
    "mixtral": {"dtype": torch.bfloat16},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 20},  # experts without whole groups stay as they are
    "gpt_oss": {},  # the experts are one tensor, and stay
}


def sequences(count: int, seed: int, length: int = 40) -> SampleRows:
    draw = np.random.default_rng(seed)
    shared = draw.integers(0, VOCAB, 8)
    rows = (np.concatenate((shared, draw.integers(0, VOCAB, length))) for _ in range(count))
    return SampleRows.of((row.astype(np.int32), length // 2) for row in rows)


def calibrate(
    source: Path, folder: Path, group: int = 32, marks: bool = False
) -> tuple[list[RoundedLayer], Quality | None]:
    checkpoint = inspect_checkpoint(source)
    folder.mkdir()
    search = Search(
        checkpoint,
        cpu_ops(quantized(checkpoint, "int4")),
        torch.float32,
        (sequences(12, 1), sequences(4, 2)),
        group=group,
        marks=marks,
    )
    written, layers = CalibratedFolder(folder, checkpoint, group, marks), []
    for index, layer in enumerate(search.layers()):
        written.add(index, layer)
        layers.append(layer)
    written.finish()
    return layers, search.loss()


def outlying(folder: Path, family: str) -> None:
    """Make a checkpoint with one large channel in every norm."""
    make_checkpoint(folder, family, **{**SIZES, **FAMILIES[family]})
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        for name, tensor in stored.items():
            if tensor.dim() == 1 and "norm" in name and name.endswith("weight"):
                tensor[3] *= 8.0
        save_file(stored, path, metadata={"format": "pt"})


def index_of(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    found: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def dequantised(folder: Path, to: Path) -> Path:
    """Dequantise the folder with compressed-tensors' layout: lowest bits first, less 8, times scales."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    to.mkdir()
    for name in [name for name in stored if name.endswith(".weight_packed")]:
        module = name.removesuffix("_packed")
        words, scales, shape = (stored.pop(module + end) for end in ("_packed", "_scale", "_shape"))
        codes = torch.stack([(words >> 4 * place & 15) - 8 for place in range(8)], -1).flatten(1)
        assert (words.dtype, shape.dtype) == (torch.int32, torch.int64)
        assert list(codes.shape) == shape.tolist()
        stored[module] = (codes.view(*scales.shape, -1) * scales.float()[..., None]).flatten(1)
    save_file(stored, to / SINGLE, metadata={"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    edit_json(to / "config.json", quantization_config=None, dtype="float32")
    return to


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_calibrated_checkpoint_equals_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlying(tmp_path / "plain", family)
    changed: list[Tensor] = []

    def watched(weight: Tensor, *others: Any) -> Tensor:
        changed.append(weight.clone())
        return round_with_feedback(weight, *others)

    monkeypatch.setattr("batchinfer.models.calibration.layer.round_with_feedback", watched)
    layers, loss = calibrate(tmp_path / "plain", tmp_path / "int4", marks=True)
    model = AutoModelForCausalLM.from_pretrained(
        dequantised(tmp_path / "int4", tmp_path / "reference"), attn_implementation="eager"
    )
    check_logits(tmp_path / "int4", model.float().eval(), lengths=(1, 17, 63))
    assert loss is not None
    assert 0 < loss.kl < 10
    check_names(tmp_path / "int4", model)
    check_weights(tmp_path / "int4", layers, family)
    check_factors(tmp_path, layers, changed)


def check_names(folder: Path, model: Any) -> None:
    """Check the names of uncompressed linear layers, including a tied head and routers."""
    plain = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    stored = index_of(folder)
    packed = {name.removesuffix(".weight_packed") for name in stored if "packed" in name}
    routers = {name.removesuffix(".weight") for name in stored if name.endswith(".gate.weight")}
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    ignored, group = set(said["ignore"]), said["config_groups"]["group_0"]
    assert routers <= ignored
    assert not ignored & packed
    assert {name for name in packed if ".experts." not in name} == plain - ignored
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "pack-quantized")
    assert (said["quantization_status"], group["targets"]) == ("compressed", ["Linear"])
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    assert wanted.items() <= group["weights"].items()


def check_weights(folder: Path, layers: list[RoundedLayer], family: str) -> None:
    """Check that rounded weights are quantised, and others have the checkpoint's dtype."""
    stored = inspect_checkpoint(folder).for_quantization("int4")
    read = CheckpointWeights(stored, torch.float32, "cpu")
    for index, layer in enumerate(layers):
        named = {linear.name for linear in layer.spec.linears if linear.stored}
        assert named
        assert {linear.name for linear in stored.spec.layers[index].linears if linear.stored} == named
        whole = family in ("mixtral", "qwen2_moe")
        assert (GATE_UP in named, DOWN in named) == (whole, whole)
        dtype = FAMILIES[family].get("dtype", torch.float32)
        for name, value in read.layer(index).items():
            wanted = layer.weights[name]
            assert torch.equal(value, wanted if name in named else wanted.to(dtype).float())


def check_factors(folder: Path, layers: list[RoundedLayer], changed: list[Tensor]) -> None:
    """Check that an adapter equal to a weight becomes the rounded weight with smoothed outliers."""
    checkpoint, factors = inspect_checkpoint(folder / "plain"), ChannelFactors.of(folder / "int4")
    before, moved = CheckpointWeights(checkpoint, torch.float32, "cpu"), 0
    for index, layer in enumerate(layers):
        own = before.layer(index)
        own_linears = [linear for linear in layer.spec.linears if not linear.experts]
        rounded = [linear for linear in own_linears if linear.stored]
        others = [linear for linear in own_linears if not linear.stored]
        after = [*(changed.pop(0) for _ in rounded), *(layer.weights[one.name] for one in others)]
        for linear, weight in zip([*rounded, *others], after, strict=True):
            a, b = factors.adapt(index, linear.name, torch.eye(linear.inputs), own[linear.name].float())
            torch.testing.assert_close(b @ a, weight, rtol=1e-4, atol=1e-6)
            moved += not torch.equal(b @ a, own[linear.name])
    assert moved >= 4
    same = torch.eye(SIZES["hidden_size"])
    of_stage = factors.of_layers((1, 2)).adapt(0, "o", same, same)
    assert all(map(torch.equal, of_stage, factors.adapt(1, "o", same, same)))


def test_layers_that_no_group_divides_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines treat all other layers as compressed. A layer opens each file of its tensors once."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **SIZES, moe_intermediate_size=96, shards=3)
    opened: list[str] = []

    def counting(path: str, **how: Any) -> Any:
        opened.append(path)
        return safe_open(path, **how)

    monkeypatch.setattr("batchinfer.models.calibration.folder.safe_open", counting)
    layers, _ = calibrate(tmp_path / "plain", tmp_path / "int4", 64)
    files = len(list((tmp_path / "plain").glob("*.safetensors")))
    assert files > 1
    assert len(opened) <= files * (1 + len(layers))
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    ignored = set(config["quantization_config"]["ignore"])
    found = index_of(tmp_path / "int4")
    packed = {name.removesuffix(".weight_packed") for name in found if name.endswith(".weight_packed")}
    matrices = {name.removesuffix(".weight") for name in found if name.endswith("proj.weight")}
    assert matrices
    assert all(".experts." in name for name in matrices)
    assert matrices <= ignored
    assert not packed & ignored


def calibrated_on(model: Path, folder: Path, device: torch.device) -> Quality:
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
def test_nothing_is_left_on_the_host(tmp_path: Path, family: str, layers: int) -> None:
    """An operator on another device must not get tensors of the host."""
    make_checkpoint(tmp_path / "plain", family, **{**SIZES, **FAMILIES[family], "num_hidden_layers": layers})
    near = calibrated_on(tmp_path / "plain", tmp_path / "near", torch.device("cpu"))
    with far_away():
        far = calibrated_on(tmp_path / "plain", tmp_path / "far", FAR)
    assert far.kl == pytest.approx(near.kl, rel=1e-2)
    assert (far.top1, far.positions) == (near.top1, near.positions)
