"""A model in transformers' code as the engine takes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.models.files.config_fields import wrong_checkpoint
from batchinfer.models.foreign.checkpoint import ForeignCheckpoint
from batchinfer.models.foreign.loading import load_causal
from batchinfer.models.foreign.model import TransformersModel
from batchinfer.models.foreign.refusal import CannotRun
from batchinfer.models.foreign.self_check import check_together, run_alone
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.spec.spec import Caches
from batchinfer_kernels.cost import ModelCost

_log = logging.getLogger(__name__)
NAME = "transformers"


class Wanting(Protocol):
    """What a model is computed in, and where."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def quantization(self) -> str: ...

    @property
    def deterministic(self) -> bool: ...

    @property
    def kv_cache(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ForeignSource:
    """See batchinfer.engine.load.sources.Source."""

    checkpoint: ForeignCheckpoint

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See Source."""
        return self.checkpoint.spec.eos_token_ids

    @property
    def vocab(self) -> int:
        """See Source."""
        return self.checkpoint.spec.vocab

    @property
    def caches(self) -> Caches:
        """See Source."""
        return [layer.cache for layer in self.checkpoint.spec.layers]

    @property
    def plain_attention(self) -> bool:
        """Not known: its layers may differ in what they ask of attention."""
        return False

    @property
    def can_be_captured(self) -> bool:
        """Nobody knows what another's code does."""
        return False

    def choose_ops(self, arithmetic: Wanting) -> Ops:
        """Those of the device for attention; where layers differ in their heads, torch's, which plan for no sizes.

        Raises Unavailable for an arithmetic that transformers' code does not have.
        """
        coded_cache = arithmetic.kv_cache != "auto"
        refused = self.checkpoint.refusals(
            arithmetic.quantization != "none", arithmetic.deterministic, coded_cache
        )
        if refused:
            raise Unavailable("; ".join(f"{key}: {text}" for key, text in refused))
        sizes = {(layer.group, layer.head_dim, layer.kv_heads) for layer in self.checkpoint.spec.layers}
        if len(sizes) > 1:
            _log.warning(
                "layers differ in their heads; torch's attention is used, which is several times slower"
            )
            return TorchOps()
        group, head_dim, kv_heads = sizes.pop()
        return choose_ops(arithmetic.device, arithmetic.dtype, group, head_dim, kv_heads=kv_heads)

    def load(self, ops: Ops, arithmetic: Wanting, longest: int) -> TransformersModel:
        """Loads, and looks whether what is loaded computes what it should. Raises JobFileError if not."""
        spec, place = self.checkpoint.spec, (arithmetic.dtype, arithmetic.device)
        causal = load_causal(self.checkpoint, *place)
        try:
            wanted = run_alone(causal, spec, arithmetic.device)
            model = TransformersModel(causal, spec, ops, wanted.returned)
            check_together(model, ops, wanted, arithmetic.dtype)
        except CannotRun as error:
            raise wrong_checkpoint(self.checkpoint.path, f"{spec.family}: {error}") from error
        return model

    def cost(self, arithmetic: Wanting) -> ModelCost:
        """See Source."""
        itemsize = arithmetic.dtype.itemsize
        return self.checkpoint.cost(itemsize, itemsize)

    def weight_bytes(self, cost: ModelCost) -> int:
        """See Source."""
        return self.checkpoint.spec.parameters * cost.itemsize

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """See Source. Only attention is computed by `ops`."""
        return NAME, NAME
