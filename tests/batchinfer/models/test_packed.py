"""Tests that MXFP4 and FP8 weights are read as transformers dequantises them, one matrix at a time."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.formats import mxfp4
from batchinfer.models.formats.compressed import CompressedFormat
from batchinfer.models.formats.fp8 import fp8_values
from batchinfer.models.formats.mxfp4 import mxfp4_values
from batchinfer.models.formats.registry import stored_format
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import edit_json
from tests.packed_weights import COMPRESSED, SINGLE, make_fp8, make_mxfp4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS: dict[str, Callable[[Path, Path], PreTrainedModel]] = {
    "mxfp4": make_mxfp4,
    "fp8": lambda folder, plain: make_fp8(folder, plain, "deepseek_v3"),
    "fp8 of rows": lambda folder, plain: make_fp8(folder, plain, "qwen3", "row"),
    "fp8 of tensors": lambda folder, plain: make_fp8(folder, plain, "llama", "tensor"),
    "fbgemm_fp8": lambda folder, plain: make_fp8(folder, plain, "llama", "row", "fbgemm_fp8"),
    "compressed-tensors": lambda folder, plain: make_fp8(folder, plain, "qwen3", "row", "compressed-tensors"),
    "fp8 of experts": lambda folder, plain: make_fp8(folder, plain, "gpt_oss", "tensor"),
}
UNREAD = ("input_scale", ".k_scale", ".v_scale", ".kv_scale")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_bitwise(dtype: torch.dtype) -> None:
    """Every byte with every scale except NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 16)
    found = mxfp4_values(values, scales).transpose(-1, -2).to(dtype)
    assert torch.equal(bits(found), bits(convert_moe_packed_tensors(values, scales, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("grid", [(3, 5), (1, 1)])
def test_fp8_bitwise(dtype: torch.dtype, scale_dtype: torch.dtype, grid: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(3 * 8, 5 * 4, generator=generator) * 90).to(torch.float8_e4m3fn)
    scales = (torch.rand(grid, generator=generator) + 0.01).to(scale_dtype)
    found = fp8_values(values, scales, None if grid == (1, 1) else (8, 4)).to(dtype)
    wanted = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
    assert torch.equal(bits(found), bits(wanted))


def test_fp8_whose_last_blocks_are_partial() -> None:
    """As in DeepSeek-V3: the 576 rows of latents and their rotated part are no multiple of a block of 128."""
    values, scales = (
        torch.ones(10, 7).to(torch.float8_e4m3fn),
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    )
    found = fp8_values(values, scales, (4, 4))
    assert found[:, [0, 3, 4, 6]].tolist() == [
        [s, s, t, t] for s, t in ((1, 2),) * 4 + ((3, 4),) * 4 + ((5, 6),) * 2
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_transformers_dequantised_ones(tmp_path: Path, kind: str) -> None:
    folder, plain = tmp_path / "packed", tmp_path / "plain"
    checkpoint = check_logits(folder, KINDS[kind](folder, plain), lengths=(1, 17, 100))
    assert checkpoint.dtype == "float32"
    for dtype in (torch.float32, torch.bfloat16):
        both = (loaded(inspect_checkpoint(path), dtype) for path in (folder, plain))
        for ours, theirs in zip(*both, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(bits(ours[name]), bits(theirs[name])) for name in ours)
    assert checkpoint.parameters == inspect_checkpoint(plain).parameters
    stored = load_file(folder / SINGLE)
    assert checkpoint.weight_bytes == sum(t.nbytes for name, t in stored.items() if not name.endswith(UNREAD))
    (notice,) = checkpoint.notices
    assert "are dequantised when they are loaded: all weights take" in notice


def loaded(checkpoint: Checkpoint, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    read = CheckpointWeights(checkpoint, dtype, "cpu")
    tables = read.tables()
    return [{"head": tables.head, "embedding": tables.embedding}, *(dict(read.layer(i)) for i in range(2))]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"config_groups": {}}, r"config_groups is \{\}; wanted an object with a group or more"),
        (
            {"sparsity_config": {"format": "sparse-48"}},
            r"format is 'sparse-48'; wanted one of sparse-24-bitmask",
        ),
        ({"num_bits": 6}, r"weights of group_0 are .*num_bits.*6.*; wanted 8-bit float by tensor, channel"),
        ({"type": "quant"}, r"weights of group_0 are .*quant.*; wanted 8-bit float"),
        ({"strategy": "group"}, r"strategy.*group.*; wanted 8-bit float by tensor, channel, block"),
        ({"strategy": "block", "block_structure": [0]}, r"block_structure of group_0 is \[0\]; wanted two"),
    ],
)
def test_mistakes_in_compressed_tensors_are_named(tmp_path: Path, change: Any, text: str) -> None:
    make_fp8(tmp_path, tmp_path / "plain", "qwen3", "row", "compressed-tensors")
    stated = copy.deepcopy(COMPRESSED)
    of_weights = {"num_bits", "type", "strategy", "block_structure"}
    (stated["config_groups"]["group_0"]["weights"] if change.keys() <= of_weights else stated).update(change)
    edit_json(tmp_path / "config.json", quantization_config=stated)
    with pytest.raises(JobFileError, match=f"compressed-tensors: .*{text}"):
        inspect_checkpoint(tmp_path)


def test_blocks_of_compressed_tensors() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}
    groups: dict[str, Any] = {
        "config_groups": {"a": {"weights": weights, "input_activations": {"num_bits": 8}}}
    }
    mistakes: list[str] = []
    stated = {"quantization_config": {"quant_method": "compressed-tensors"} | groups}
    found = stored_format(stated, mistakes)
    assert isinstance(found, CompressedFormat)
    assert found.block == (128, 64)
    groups["config_groups"]["b"] = {"weights": weights | {"strategy": "channel"}}
    assert stored_format(stated, mistakes) is None
    assert "different blocks" in mistakes[0]


@pytest.mark.parametrize("activations", [{"num_bits": 8, "type": "float"}, None, ...])
def test_unquantised_activations_are_not_multiplied_with_quantised_values(
    tmp_path: Path, activations: Any
) -> None:
    make_fp8(tmp_path, tmp_path / "plain", "llama", "row", "compressed-tensors")
    stated = copy.deepcopy(COMPRESSED)
    group = stated["config_groups"]["group_0"]
    group["input_activations"] = activations
    if activations is ...:
        del group["input_activations"]
    edit_json(tmp_path / "config.json", quantization_config=stated)
    wanted = "stored" if isinstance(activations, dict) else "none"
    assert inspect_checkpoint(tmp_path).stored_quantization == wanted


def test_one_expert_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mxfp4(tmp_path / "packed", tmp_path / "plain")
    made: list[tuple[int, ...]] = []

    def noted(values: Tensor, scales: Tensor) -> Tensor:
        found = mxfp4_values(values, scales)
        made.append(tuple(found.shape))
        return found

    monkeypatch.setattr(mxfp4, "mxfp4_values", noted)
    CheckpointWeights(inspect_checkpoint(tmp_path / "packed"), torch.float32, "cpu").layer(0)
    assert sorted(made) == sorted([(64, 64), (64, 32)] * 5)


def test_scales_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, tmp_path / "plain")
    before = inspect_checkpoint(tmp_path).fingerprint({})
    stored = load_file(tmp_path / SINGLE)
    stored["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] += 1
    save_file(stored, tmp_path / SINGLE)
    assert inspect_checkpoint(tmp_path).fingerprint({}) != before


Q = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.experts.gate_up_proj"
BLOCKS, PARTS = f"{UP}_blocks", f"{UP}_scales"
FEWER = {name: lambda tensor: tensor[:4].clone() for name in (BLOCKS, PARTS)}
# Kind, changes of tensors (None: removed), message
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("fp8", {f"{Q}_scale_inv": None}, f"{Q} is FP8, and its scales {Q}_scale_inv are missing"),
    ("fp8", {f"{Q}_scale_inv": lambda _: torch.ones(3, 2)}, f"{Q}_scale_inv [3, 2] (F32) are no"),
    ("fp8", {Q: None}, f"missing tensors: {Q}"),
    ("fp8", {Q: lambda tensor: tensor[:32].clone()}, f"{Q} [32, 48] (F8_E4M3) and"),
    ("mxfp4", {PARTS: None}, f"unexpected tensors: {BLOCKS}"),
    ("mxfp4", {PARTS: lambda _: torch.ones(5, 64, 1).byte()}, f"{PARTS} [5, 64, 1] (U8) are no"),
    ("mxfp4", {UP: lambda _: torch.ones(5, 64, 64)}, f"{BLOCKS} [5, 64, 2, 16] (U8) and"),
    ("mxfp4", FEWER, f"tensors of a wrong shape: {UP} [4, 64, 64] instead of [5, 64, 64]"),
]


@pytest.mark.parametrize(("kind", "changes", "text"), WRONG)
def test_refused(tmp_path: Path, kind: str, changes: dict[str, Any], text: str) -> None:
    if kind == "mxfp4":
        make_mxfp4(tmp_path, tmp_path / "plain")
    else:
        make_fp8(tmp_path, tmp_path / "plain", "llama")
    stored = load_file(tmp_path / SINGLE)
    for name, change in changes.items():
        before = stored.pop(name, None)
        stored |= {} if change is None else {name: change(before)}
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(JobFileError) as raised:
        inspect_checkpoint(tmp_path)
    assert text in str(raised.value)


def test_packed_weights_that_config_json_does_not_name(tmp_path: Path) -> None:
    make_fp8(tmp_path, tmp_path / "plain", "llama")
    edit_json(tmp_path / "config.json", quantization_config=...)
    with pytest.raises(
        JobFileError, match=r"unexpected tensors: .*weight_scale_inv(.|\n)*not float: .*F8_E4M3"
    ):
        inspect_checkpoint(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
