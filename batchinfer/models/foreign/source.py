"""A model in transformers' code as the engine takes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from batchinfer.core.errors import Unavailable
from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.files.config_fields import wrong_checkpoint
from batchinfer.models.foreign.checkpoint import ForeignCheckpoint
from batchinfer.models.foreign.loading import load_causal
from batchinfer.models.foreign.model import TransformersModel
from batchinfer.models.foreign.refusal import CannotRun
from batchinfer.models.foreign.self_check import check_together, run_alone
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec.spec import AttentionRules
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.cost import ModelCost

_log = logging.getLogger(__name__)
NAME = "transformers"


@dataclass(frozen=True, slots=True)
class ForeignSource:
    """A model of a checkpoint that is no family of ours: transformers' code computes it."""

    checkpoint: ForeignCheckpoint
    quantization: Quantization = "none"  # as it was asked for
    # Whether its steps launch the same kernels each time is not known, nor what its layers ask of attention
    can_be_captured: ClassVar[bool] = False
    adapters: ClassVar[Mapping[str, StoredAdapter]] = MappingProxyType({})  # it is given none
    prompt_layers: ClassVar[Mapping[AttentionRules, int]] = MappingProxyType({})

    @property
    def spec(self) -> ForeignSpec:
        return self.checkpoint.spec

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """Choose the device's operators for attention; where layers differ in their heads, torch's, which plan for no
        sizes.

        Raises Unavailable for an arithmetic that transformers' code does not have.
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
        """Load the model and check that it computes what it should; return what gives it. Its prompts are read by `ops`
        alone, and its own code knows the positions. Raises JobFileError for a model that computes something else."""
        spec = self.spec
        causal = load_causal(self.checkpoint, arithmetic.dtype, arithmetic.device)
        try:
            wanted = run_alone(causal, spec, arithmetic.device)
            model = TransformersModel(causal, spec, ops, wanted.returned)
            check_together(model, ops, wanted, arithmetic.dtype)
        except CannotRun as error:
            raise wrong_checkpoint(self.checkpoint.path, f"{spec.family}: {error}") from error
        return lambda _ops, _longest: model

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """Return what its steps cost."""
        itemsize = arithmetic.dtype.itemsize
        return self.checkpoint.cost(itemsize)

    def weight_bytes(self, cost: ModelCost) -> int:
        """Return the bytes of its loaded weights."""
        return self.spec.parameters * cost.itemsize

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """Return whose code computes it, for the report; only attention is computed by `ops`."""
        return NAME, NAME
