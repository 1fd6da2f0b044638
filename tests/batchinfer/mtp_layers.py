"""A DeepSeek-V3 with an MTP layer after its last layer, with names as in published checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.checkpoints import make_checkpoint

WEIGHTS = "model.safetensors"


class MtpReference:
    """A plain reference of an MTP layer, with the arithmetic of the technical report.

    It computes all positions of a row at once, and all of them again for each further token. The layer itself
    is transformers' own.
    """

    def __init__(self, model: PreTrainedModel, around: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
        self.model, self.stored = model, stored
        self.around, self.layer = around, model.model.layers[-1]
        model.model.layers = model.model.layers[:-1]

    @torch.inference_mode()
    def proposed(self, tokens: Sequence[int], count: int, allowed: Sequence[int]) -> list[int]:
        """Return `count` proposed tokens after the tokens of a row, all of them in `allowed`."""
        own = self.model.model
        barred = ~torch.isin(torch.arange(self.model.config.vocab_size), torch.tensor(allowed))
        states, said = own(torch.tensor([list(tokens[:-1])])).last_hidden_state[0], list(tokens[1:])
        for _ in range(count):
            embedded = own.embed_tokens(torch.tensor(said))
            x = torch.cat((self._normed("enorm", embedded), self._normed("hnorm", states)), -1)
            x = x @ self.around["eh_proj"].T
            places = torch.arange(len(said))[None]
            mask = torch.full((len(said), len(said)), float("-inf")).triu(1)[None, None]
            given = self.layer(
                x[None],
                attention_mask=mask,
                position_ids=places,
                position_embeddings=own.rotary_emb(x[None], places),
            )
            given = given[0] if isinstance(given, tuple) else given
            last = self._normed("shared_head.norm", given[0])[-1:]
            said.append(int(self.model.lm_head(last)[0].masked_fill(barred, float("-inf")).argmax()))
            states = torch.cat((states, last))
        return said[len(tokens) - 1 :]

    def _normed(self, name: str, x: Tensor) -> Tensor:
        eps = self.model.config.rms_norm_eps
        return self.around[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def start_of(layers: int) -> str:
    """Return the prefix of the names of the layer after the model's `layers` layers."""
    return f"model.layers.{layers}."


def add_mtp(folder: Path, layers: int = 2, **options: Any) -> MtpReference:
    """Make a checkpoint of `layers` layers and an MTP layer."""
    model = make_checkpoint(folder, "deepseek_v3", seed=5, num_hidden_layers=layers + 1, **options)
    start = start_of(layers)
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / WEIGHTS)
    torch.manual_seed(7)
    hidden = config["hidden_size"]
    around = {name: 1 + 0.2 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    around["eh_proj"] = nn.init.normal_(torch.empty(hidden, 2 * hidden), std=0.15)
    further = {f"{start}{name}.weight": one for name, one in around.items()}
    further[f"{start}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    further[f"{start}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    weights |= further
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    said = {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | said))
    return MtpReference(
        model,
        around,
        {name.removeprefix(start): one for name, one in weights.items() if name.startswith(start)},
    )


def weights_changed(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the stored tensors of such a layer."""
    weights, start = load_file(folder / WEIGHTS), start_of(2)
    own = {name.removeprefix(start): one for name, one in weights.items() if name.startswith(start)}
    others = {name: one for name, one in weights.items() if not name.startswith(start)}
    change(own)
    save_file(others | {start + name: one for name, one in own.items()}, folder / WEIGHTS, {"format": "pt"})
