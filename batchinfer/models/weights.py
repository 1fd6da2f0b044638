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
from batchinfer.models.parameters import fused
from batchinfer.models.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    HEAD,
    StoredParameter,
    layer_names,
)

# One layer's tensors, fused as `parameters.fused` says: "qkv" and "qkv.bias", "input_norm" and so on
LayerWeights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What stands before and after the layers. Tied, `head` is the very tensor `embedding`."""

    embedding: Tensor  # (vocab, hidden)
    head: Tensor  # (vocab, hidden)
    final_norm: Tensor  # (hidden,)
    final_norm_bias: Tensor | None = None  # (hidden,)


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
        names = (prefix + EMBEDDING, HEAD, prefix + FINAL_NORM, prefix + FINAL_NORM_BIAS)
        found = self._read([name for name in names if name in stored])
        norm = (found[prefix + FINAL_NORM], found.get(prefix + FINAL_NORM_BIAS))
        embedding, head = found.get(prefix + EMBEDDING), found.get(HEAD)
        if embedding is None or head is None:  # tied, only one of them stored
            table = embedding if embedding is not None else found[HEAD]
            return Tables(table, table, *norm)
        # transformers ties two stored tables only when they are equal, whatever config.json says
        same = self._checkpoint.spec.tied and torch.equal(embedding, head)
        return Tables(embedding, embedding if same else head, *norm)

    def layer(self, index: int) -> LayerWeights:
        names = layer_names(self._checkpoint.spec, index, self._checkpoint.prefix)
        with _OpenFiles(self._checkpoint) as files:

            def joined(parameters: Sequence[str]) -> Tensor:
                return self._copied([files.parameter(names[parameter]) for parameter in parameters])

            return dict(fused(self._checkpoint.spec.layers[index], joined))

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        with _OpenFiles(self._checkpoint) as files:
            return {name: self._copied([files.tensor(name)]) for name in names}

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

    def parameter(self, stored: StoredParameter) -> Tensor:
        """Its rows of the tensor that holds it."""
        tensor = self.tensor(stored.tensor)
        return tensor if stored.rows is None else tensor[slice(*stored.rows)]

    def tensor(self, name: str) -> Tensor:
        path = self._checkpoint.tensors[name].file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        tensor: Tensor = self._open[path].get_tensor(name)
        return tensor
