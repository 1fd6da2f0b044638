"""Tiny checkpoints with weights in the published layouts of MXFP4 and FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import edit_json, make_checkpoint

SINGLE = "model.safetensors"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
BLOCK = 16  # DeepSeek's and Qwen's are of 128 rows and columns
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "model.layers.0.self_attn.o_proj"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
}
_FLOAT = ("norm", "embed_tokens", "lm_head", "gate.", "layers.0.self_attn.o_proj", ".bias", "_bias")


def make_mxfp4(folder: Path, plain: Path, **sizes: Any) -> PreTrainedModel:
    """Write gpt-oss in OpenAI's format to `folder`, and its copy dequantised by transformers to `plain`."""
    model = make_checkpoint(plain, "gpt_oss", **{"hidden_size": 64, "intermediate_size": 32, **sizes})
    stored, generator = load_file(plain / SINGLE), torch.Generator().manual_seed(4)
    packed = {name: tensor for name, tensor in stored.items() if not _is_experts(name)}
    for name in filter(_is_experts, stored):
        experts, inputs, outputs = stored[name].shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, groups, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        stored[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return _saved(folder, plain, model, packed, stored, MXFP4)


def _is_experts(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def make_fp8(
    folder: Path,
    plain: Path,
    family: str,
    each: str = "block",
    method: str = "fp8",
    block: int = BLOCK,
    **sizes: Any,
) -> PreTrainedModel:
    """Write an FP8 model to `folder` and its dequantised copy to `plain`.

    Args:
        each: part with a scale: "block", "row" (of outputs) or "tensor".
        method: name of the quantisation in config.json.
    """
    model = make_checkpoint(plain, family, **sizes)
    stored, packed = load_file(plain / SINGLE), {}
    for name, tensor in stored.items():
        packs = tensor.dim() == 2 or (each == "tensor" and tensor.dim() == 3)  # matrices of all experts
        if any(part in name for part in _FLOAT) or not packs:
            packed[name] = tensor
            continue
        scales = _scales(tensor, each, block)
        spread = _spread(scales, tensor, each, block)
        values = (tensor / spread).to(torch.float8_e4m3fn)
        stored[name] = values.float() * spread
        packed |= {name: values, name + ("_scale_inv" if each == "block" else "_scale"): scales}
        if each == "tensor":
            packed[name.removesuffix("weight") + "input_scale"] = torch.tensor(3.0)
    config = {**FP8, "weight_block_size": [block, block]}
    if each != "block":
        config |= {"weight_block_size": None, "activation_scheme": "static"}
    if method != "fp8":
        config = COMPRESSED if method == "compressed-tensors" else {"quant_method": method}
        packed |= {f"model.layers.0.self_attn.{name}_scale": torch.tensor(0.5) for name in ("k", "v", "kv")}
    return _saved(folder, plain, model, packed, stored, config)


def _scales(tensor: Tensor, each: str, block: int) -> Tensor:
    if each == "tensor":
        return tensor.abs().max() / 448
    if each == "row":
        return tensor.abs().amax(1, keepdim=True) / 448
    blocks = [
        torch.stack([part.abs().max() / 448 for part in rows.split(block, 1)]) for rows in tensor.split(block)
    ]
    return torch.stack(blocks)


def _spread(scales: Tensor, tensor: Tensor, each: str, block: int) -> Tensor:
    if each != "block":
        return scales
    rows, columns = tensor.shape
    return scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]


def _saved(
    folder: Path,
    plain: Path,
    model: PreTrainedModel,
    packed: dict[str, Tensor],
    stored: dict[str, Tensor],
    config: dict[str, Any],
) -> PreTrainedModel:
    """Write both folders, and put the dequantised weights into the model."""
    save_file(stored, plain / SINGLE, metadata={"format": "pt"})
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    edit_json(folder / "config.json", quantization_config=config)
    save_file(packed, folder / SINGLE, metadata={"format": "pt"})
    return type(model).from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()
