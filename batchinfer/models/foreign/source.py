"""Loads a model that transformers' code computes, from safetensors files that were checked before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.core.errors import Unavailable
from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.files.config_fields import checkpoint_error
from batchinfer.models.files.weight_files import StoredTensor, listed
from batchinfer.models.foreign.checkpoint import ForeignCheckpoint
from batchinfer.models.foreign.interface import ATTENTION_NAME, class_of, config_of, silence_transformers
from batchinfer.models.foreign.model import TransformersModel
from batchinfer.models.foreign.self_check import check_together, run_alone
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec
from batchinfer.models.ops.choose import Arithmetic, choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.cost import ModelCost

_log = logging.getLogger(__name__)
NAME = "transformers"
_GROUPED_BYTES = 16


@dataclass(frozen=True, slots=True)
class ForeignSource:
    """A checkpoint whose model transformers' code computes, and the way it is loaded into the engine.

    Attributes:
        checkpoint: The checkpoint folder.
        quantization: The job's value of model.quantization.
        can_be_captured: False: CUDA graphs are not used, since a step may launch other kernels each time.
        adapters: Empty, since adapters are unsupported.
        prompt_layers: Empty, since no prompt kernels are compared for these models.
    """

    checkpoint: ForeignCheckpoint
    quantization: Quantization = "none"
    can_be_captured: ClassVar[bool] = False
    adapters: ClassVar[Mapping[str, StoredAdapter]] = MappingProxyType({})
    prompt_layers: ClassVar[Mapping[AttentionRules, int]] = MappingProxyType({})

    @property
    def spec(self) -> ForeignSpec:
        """Return the sizes and attention of the model."""
        return self.checkpoint.spec

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """Return the operators for attention: the device's, or torch's if layers differ in the number or size of heads.

        Args:
            arithmetic: Device, dtypes and determinism of the engine.

        Raises:
            Unavailable: Transformers' code does not support the job's quantisation or determinism.
        """
        coded_cache = arithmetic.kv_cache != "auto"
        refused = self.checkpoint.refusals(self.quantization != "none", arithmetic.deterministic, coded_cache)
        if refused:
            raise Unavailable("; ".join(f"{key}: {text}" for key, text in refused))
        sizes = {(layer.group, layer.head_dim, layer.kv_heads) for layer in self.spec.layers}
        if len(sizes) > 1:
            _log.warning(
                "layers differ in their heads; torch's attention is used, which is several times slower"
            )
            return TorchOps()
        group, head_dim, kv_heads = sizes.pop()
        return choose_ops(arithmetic.device, arithmetic.dtype, group, head_dim, kv_heads=kv_heads)

    def load(self, ops: Ops, arithmetic: Arithmetic) -> Callable[[Ops, int], TransformersModel]:
        """Load the model, and check that it computes the same logits in the engine as with transformers' own attention.

        Args:
            ops: The operators that compute attention.
            arithmetic: Device and dtype of the model.

        Returns:
            A function that returns the model. Its arguments, operators and a number of positions, are ignored.

        Raises:
            JobFileError: The logits differ.
        """
        spec = self.spec
        causal = load_causal(self.checkpoint, arithmetic.dtype, arithmetic.device)
        try:
            wanted = run_alone(causal, spec, arithmetic.device)
            model = TransformersModel(causal, spec, ops, wanted.returned)
            check_together(model, ops, wanted, arithmetic.dtype)
        except CannotRun as error:
            raise checkpoint_error(self.checkpoint.path, f"{spec.family}: {error}") from error
        return lambda _ops, _longest: model

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """Return the FLOPs and memory traffic of the model's steps in the dtype of `arithmetic`."""
        itemsize = arithmetic.dtype.itemsize
        return self.checkpoint.cost(itemsize)

    def weight_bytes(self, cost: ModelCost) -> int:
        """Return the bytes of the loaded weights: all parameters, in the dtype of `cost`."""
        return self.spec.parameters * cost.itemsize

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """Return the names of the libraries that compute the model: "transformers" twice. `ops` is ignored."""
        return NAME, NAME


def load_causal(checkpoint: ForeignCheckpoint, dtype: torch.dtype, device: torch.device | str) -> Any:
    """Load and return a transformers model with its output layer, in `dtype` on `device`.

    Args:
        checkpoint: The checkpoint folder.
        dtype: The dtype of weights and activations.
        device: The device of the weights.

    Raises:
        JobFileError: The weights do not match config.json.
    """
    config = config_of(checkpoint.raw)
    kind = class_of(config, checkpoint.raw)
    with silence_transformers():
        causal, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=_mapped(checkpoint.tensors),
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_loaded(checkpoint, found)
    if kind._can_set_experts_implementation() and not _can_be_grouped(causal):
        causal.set_experts_implementation("eager")
    return causal.to(device).eval().requires_grad_(False)


def _can_be_grouped(causal: Any) -> bool:
    # torch's grouped matmul needs rows that start at multiples of 16 bytes; experts' weights have three dimensions
    stacks = (values for values in causal.parameters() if values.dim() == 3)
    return all(side * one.element_size() % _GROUPED_BYTES == 0 for one in stacks for side in one.shape[1:])


def _mapped(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
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
        raise checkpoint_error(checkpoint.path, *messages, hint=hint)
