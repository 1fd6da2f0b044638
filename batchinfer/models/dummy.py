"""Weights that nobody trained: seeded random numbers in the sizes of a configuration. They cost what real ones do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchinfer.models.config import ModelConfig
from batchinfer.models.tensor_names import (
    BASE_PREFIX,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    expected_shapes,
    layer_shapes,
)
from batchinfer.models.weights import GATE_UP, QKV, LayerWeights, Tables, Weights

_TABLES = -1  # where the layers' seeds start counting


def parameter_count(config: ModelConfig) -> int:
    """Values in all tensors; a tied head counts once."""
    return sum(
        math.prod(shape) for name, shape in expected_shapes(config, "").items() if _is_own(config, name)
    )


def _is_own(config: ModelConfig, name: str) -> bool:
    return not (config.tied and name == HEAD)


class DummyWeights(Weights):
    """Normal numbers in every matrix, 1 in every norm, 0 in every bias.

    Their deviation is 1 / √hidden: layers then give values of about one, which all dtypes hold, and change the
    hidden state enough that an answer depends on its whole prompt.
    A layer depends on the seed and its own number only, so that asking again, in any order, gives equal tensors on
    the same kind of device.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0
    ) -> None:
        self._config, self._dtype, self._device, self._seed = config, dtype, torch.device(device), seed
        self._deviation = config.hidden**-0.5

    def tables(self) -> Tables:
        names = [name for name in (EMBEDDING, HEAD, FINAL_NORM) if _is_own(self._config, name)]
        shapes = expected_shapes(self._config, "")
        found = self._drawn(_TABLES, {name: shapes[name] for name in names})
        return Tables(found[EMBEDDING], found.get(HEAD, found[EMBEDDING]), found[FINAL_NORM])

    def layer(self, index: int) -> LayerWeights:
        raw = self.layer_tensors(index)
        bias = {
            "qkv_bias": _joined(raw, QKV, "bias"),
            "o_bias": raw.get("self_attn.o_proj.bias"),
            "gate_up_bias": _joined(raw, GATE_UP, "bias"),
            "down_bias": raw.get("mlp.down_proj.bias"),
        }
        return LayerWeights(
            input_norm=raw["input_layernorm.weight"],
            post_norm=raw["post_attention_layernorm.weight"],
            qkv=torch.cat([raw[f"{name}.weight"] for name in QKV]),
            o=raw["self_attn.o_proj.weight"],
            gate_up=torch.cat([raw[f"{name}.weight"] for name in GATE_UP]),
            down=raw["mlp.down_proj.weight"],
            q_norm=raw.get("self_attn.q_norm.weight"),
            k_norm=raw.get("self_attn.k_norm.weight"),
            **bias,
        )

    def layer_tensors(self, index: int) -> dict[str, Tensor]:
        """One layer by Hugging Face's names within a layer, not yet fused."""
        return self._drawn(index, layer_shapes(self._config))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by the name that a checkpoint gives it; a tied head is left out."""
        tables = self.tables()
        yield BASE_PREFIX + EMBEDDING, tables.embedding
        if not self._config.tied:
            yield HEAD, tables.head
        for index in range(self._config.layers):
            for name, tensor in self.layer_tensors(index).items():
                yield f"{BASE_PREFIX}layers.{index}.{name}", tensor
        yield BASE_PREFIX + FINAL_NORM, tables.final_norm

    def _drawn(self, part: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        generator = torch.Generator(self._device).manual_seed((self._seed << 20) + part - _TABLES)
        return {name: self._tensor(name, shape, generator) for name, shape in shapes.items()}

    def _tensor(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        place: Any = {"dtype": self._dtype, "device": self._device}
        if name.endswith(".bias"):
            return torch.zeros(shape, **place)
        if len(shape) == 1:
            return torch.ones(shape, **place)
        return torch.empty(shape, **place).normal_(0.0, self._deviation, generator=generator)


def _joined(raw: Mapping[str, Tensor], names: tuple[str, ...], kind: str) -> Tensor | None:
    found = [raw[f"{name}.{kind}"] for name in names if f"{name}.{kind}" in raw]
    return torch.cat(found) if found else None


def write_checkpoint(folder: Path, config_json: Mapping[str, Any], weights: DummyWeights) -> None:
    """The weights as a Hugging Face checkpoint: what other engines can load. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in weights.named()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config_json, "dtype": dtype}, indent=2), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
