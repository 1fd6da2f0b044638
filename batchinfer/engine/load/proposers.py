"""Loads what proposes tokens beside a model: a smaller model, or the model's own heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer.engine.config import LoadConfig
from batchinfer.engine.load.beside import WeightsBeside, load_beside
from batchinfer.engine.load.device_fit import Fitted
from batchinfer.engine.load.heads import load_heads
from batchinfer.engine.load.loaded_heads import HeadedModel, LoadedHeads
from batchinfer.engine.load.loaded_model import AnyBeside
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import Source


@dataclass(frozen=True, slots=True)
class Proposers:
    """The weights of what proposes: at most one of both."""

    beside: WeightsBeside | None = None
    heads: LoadedHeads | None = None

    @property
    def loaded(self) -> LoadedHeads | WeightsBeside | None:
        """Return what takes memory beside the model; None: nothing does."""
        return self.heads or self.beside

    def watching(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a runner that keeps in its cache what heads read. Raises Unavailable where its blocks cannot be
        shared."""
        return own if self.heads is None else self.heads.watching(own, longest, max_num_seqs)

    def of(
        self, source: Source, fitted: Fitted, longest: int, masks: ConstraintMasks | None
    ) -> tuple[ModelRunner, AnyBeside | None]:
        """Return the runner of the model `source`, and what proposes beside it, if anything does."""
        runner, limits, blocks = fitted.runner, fitted.limits, fitted.blocks
        if self.heads is not None:
            return self.heads.of(HeadedModel(runner, source.spec, limits, blocks, longest, masks))
        if self.beside is None:
            return runner, None
        return runner, self.beside.runner(runner, source.spec, limits, blocks, longest, masks)


def load_proposers(
    config: LoadConfig, arithmetic: Arithmetic, device: torch.device, company: Company
) -> Proposers:
    """Load what the configuration names. Raises what loading a checkpoint raises."""
    return Proposers(load_beside(config, device, company), load_heads(config, arithmetic, company))
