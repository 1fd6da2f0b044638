"""Random LoRA adapters in PEFT's format, and models with the merged adapters."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

START = "base_model.model."


def modules_named(model: PreTrainedModel, ends: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear modules of a model with these name suffixes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and name.endswith(tuple(ends)):
            yield name, module


def sizes(module: nn.Module) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def make_adapter(
    folder: Path,
    model: PreTrainedModel,
    ends: Sequence[str],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    dora: bool = False,
    **config: Any,
) -> Path:
    """Save an adapter of all modules with these name suffixes.

    Args:
        ranks: ranks of single modules, by suffixes of their names.
    """
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, module in modules_named(model, ends):
        outputs, inputs = sizes(module)
        own = next((r for end, r in (ranks or {}).items() if name.endswith(end)), rank)
        a, b = torch.randn(own, inputs, generator=generator), torch.randn(outputs, own, generator=generator)
        tensors[f"{START}{name}.lora_A.weight"] = (a / inputs**0.5).to(dtype)
        tensors[f"{START}{name}.lora_B.weight"] = (b / 4).to(dtype)
        if dora:
            sizes_of_rows = torch.rand(outputs, generator=generator) + 0.5
            tensors[f"{START}{name}.lora_magnitude_vector"] = sizes_of_rows.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": sorted({end.rpartition(".")[2] for end in ends}),
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": dora,
        "rank_pattern": ranks or {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return a copy of the model with W + scale B A as its weights, rescaled for DoRA, like PEFT's
    merge_and_unload."""
    found, stated = copy.deepcopy(model), json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in found.named_modules():
        a = tensors.get(f"{START}{name}.lora_A.weight")
        if a is None:
            continue
        b = tensors[f"{START}{name}.lora_B.weight"]
        alpha = next(
            (v for end, v in stated["alpha_pattern"].items() if name.endswith(end)), stated["lora_alpha"]
        )
        scale = alpha / (len(a) ** 0.5 if stated["use_rslora"] else len(a))
        change = scale * (b.double() @ a.double())
        weight: Tensor = module.weight  # type: ignore[assignment]
        turned = isinstance(module, Conv1D)
        whole = (weight.data.T if turned else weight.data).double() + change
        sizes_of_rows = tensors.get(f"{START}{name}.lora_magnitude_vector")
        if sizes_of_rows is not None:
            whole *= (sizes_of_rows.double() / whole.norm(dim=1))[:, None]
        weight.data = (whole.T if turned else whole).to(weight.dtype).contiguous()
    return found
