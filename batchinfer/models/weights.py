"""The weights of a checkpoint, read layer by layer in the run's dtype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.models.checkpoint import Checkpoint
from batchinfer.models.tensor_names import EMBEDDING, FINAL_NORM, HEAD, layer_shapes

QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer: weights (out, in), q above k above v, gate above up."""

    input_norm: Tensor
    post_norm: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What stands before and after the layers. Tied, `head` is the very tensor `embedding`."""

    embedding: Tensor  # (vocab, hidden)
    head: Tensor  # (vocab, hidden)
    final_norm: Tensor  # (hidden,)


class Weights(ABC):
    """Where a decoder gets its weights from, a layer at a time, so that it never needs them all twice."""

    @abstractmethod
    def tables(self) -> Tables:
        """Embedding, head and final norm."""

    @abstractmethod
    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer, in tensors of their own."""


class CheckpointWeights(Weights):
    """Weights out of safetensors files, mapped only while a layer is copied out of them."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def tables(self) -> Tables:
        prefix, stored = self._checkpoint.prefix, self._checkpoint.tensors
        wanted = [name for name in (prefix + EMBEDDING, HEAD, prefix + FINAL_NORM) if name in stored]
        found = self._read(wanted)
        embedding, head = found.get(prefix + EMBEDDING), found.get(HEAD)
        if embedding is None or head is None:  # tied, only one of them stored
            table = embedding if embedding is not None else found[HEAD]
            return Tables(table, table, found[prefix + FINAL_NORM])
        # transformers ties two stored tables only when they are equal, whatever config.json says
        same = self._checkpoint.config.tied and torch.equal(embedding, head)
        return Tables(embedding, embedding if same else head, found[prefix + FINAL_NORM])

    def layer(self, index: int) -> LayerWeights:
        start = f"{self._checkpoint.prefix}layers.{index}."
        names = [start + name for name in layer_shapes(self._checkpoint.config)]
        with _OpenFiles(self._checkpoint) as files:
            raw = {name.removeprefix(start): files.tensor(name) for name in names}
            return self._fused(raw)

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        with _OpenFiles(self._checkpoint) as files:
            return {name: self._copied([files.tensor(name)]) for name in names}

    def _fused(self, raw: Mapping[str, Tensor]) -> LayerWeights:
        def joined(*names: str) -> Tensor:
            return self._copied([raw[name] for name in names])

        def optional(*names: str) -> Tensor | None:
            return joined(*names) if names[0] in raw else None

        return LayerWeights(
            input_norm=joined("input_layernorm.weight"),
            post_norm=joined("post_attention_layernorm.weight"),
            qkv=joined(*(f"{name}.weight" for name in QKV)),
            o=joined("self_attn.o_proj.weight"),
            gate_up=joined(*(f"{name}.weight" for name in GATE_UP)),
            down=joined("mlp.down_proj.weight"),
            qkv_bias=optional(*(f"{name}.bias" for name in QKV)),
            o_bias=optional("self_attn.o_proj.bias"),
            gate_up_bias=optional(*(f"{name}.bias" for name in GATE_UP)),
            down_bias=optional("mlp.down_proj.bias"),
            q_norm=optional("self_attn.q_norm.weight"),
            k_norm=optional("self_attn.k_norm.weight"),
        )

    def _copied(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts above one another, cast and copied out of the mapped file in one pass."""
        rows = sum(part.shape[0] for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        start = 0
        for part in parts:
            whole[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return whole


class _OpenFiles:
    """The files of a checkpoint, mapped when first needed and unmapped at the end."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def tensor(self, name: str) -> Tensor:
        path = self._checkpoint.tensors[name].file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor
