"""Loads a checkpoint into transformers' classes: safetensors files that were checked before, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.models.files.config_fields import wrong_checkpoint
from batchinfer.models.files.weight_files import StoredTensor, listed
from batchinfer.models.foreign.checkpoint import ForeignCheckpoint
from batchinfer.models.foreign.classes import class_of, config_of
from batchinfer.models.foreign.interface import NAME
from batchinfer.models.foreign.probe import quiet

_GROUPED_BYTES = 16


def load_causal(checkpoint: ForeignCheckpoint, dtype: torch.dtype, device: torch.device | str) -> Any:
    """The model with its head, in `dtype` on `device`. Raises JobFileError where the weights are not config.json's."""
    config = config_of(checkpoint.raw)
    kind = class_of(config, checkpoint.raw)
    with quiet():
        causal, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=_mapped(checkpoint.tensors),
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_loaded(checkpoint, found)
    if kind._can_set_experts_implementation() and not _can_be_grouped(causal):
        causal.set_experts_implementation("eager")
    return causal.to(device).eval().requires_grad_(False)


def _can_be_grouped(causal: Any) -> bool:
    """Whether torch's grouped matmul takes the experts: rows of theirs begin at multiples of 16 bytes. The weights of
    all experts of a layer are one tensor of three dimensions."""
    stacks = (values for values in causal.parameters() if values.dim() == 3)
    return all(side * one.element_size() % _GROUPED_BYTES == 0 for one in stacks for side in one.shape[1:])


def _mapped(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Views of the mapped files: read where they are copied out of."""
    opened: dict[Path, Any] = {}
    with ExitStack() as stack:
        for stored in tensors.values():
            if stored.file not in opened:
                file = safe_open(str(stored.file), framework="pt", device="cpu")
                opened[stored.file] = stack.enter_context(file)
        return {name: opened[stored.file].get_tensor(name) for name, stored in tensors.items()}


def _check_loaded(checkpoint: ForeignCheckpoint, found: Mapping[str, Any]) -> None:
    wrong = (
        ("missing tensors", found["missing_keys"]),
        ("unexpected tensors", found["unexpected_keys"]),
        ("tensors of a wrong shape", {name for name, *_ in found["mismatched_keys"]}),
    )
    messages = [f"{what}: {listed(sorted(names))}" for what, names in wrong if names]
    messages += [str(text) for text in found["error_msgs"]]
    if messages:
        hint = (
            f"config.json describes another model than the weights, or another than {checkpoint.spec.family}"
        )
        raise wrong_checkpoint(checkpoint.path, *messages, hint=hint)
