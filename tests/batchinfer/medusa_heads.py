"""Published Medusa heads: a ModuleList of residual blocks and a linear layer, with a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class ResBlock(nn.Module):
    """A residual block as in FasterDecoding/Medusa."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.act(self.linear(x))
        return added


def heads_of(hidden: int, vocab: int, heads: int, layers: int, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(
        nn.Sequential(*(ResBlock(hidden) for _ in range(layers)), nn.Linear(hidden, vocab, bias=False))
        for _ in range(heads)
    )


def save_heads(folder: Path, heads: nn.ModuleList, layers: int, stated: int | None = None) -> Path:
    folder.mkdir()
    save_file(
        {name: one.contiguous() for name, one in heads.state_dict().items()},
        folder / "medusa_lm_head.safetensors",
    )
    config = {
        "medusa_num_heads": len(heads) if stated is None else stated,
        "medusa_num_layers": layers,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
