"""Loads what proposes tokens beside a model: a smaller model, or the model's own heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.medusa import HeadsRunner, MedusaHeads
from batchinfer.engine.load.beside import WeightsBeside, load_beside
from batchinfer.engine.load.device_fit import Fitted
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_model import AnyBeside, HeadedModel, LoadedHeads
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.tensors.graph_sizes import KEPT_STEPS, kept_rows
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_heads import StoredLayer
from batchinfer.models.heads.stored_medusa import StoredMedusa
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import Source


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMedusa(LoadedHeads):
    """Medusa heads, which read the states of sampled tokens alone, and keep nothing."""

    stored: StoredMedusa
    heads: MedusaHeads
    itemsize: int
    on_gpu: bool = False

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of their weights."""
        return self.stored.weight_bytes(self.itemsize)

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the bytes of the states that a GPU keeps."""
        return self.stored.state_bytes(kept_rows(max_num_seqs), self.itemsize) if self.on_gpu else 0

    def of(self, model: HeadedModel) -> tuple[ModelRunner, HeadsRunner]:
        """Make a runner that keeps its hidden states, and what proposes from these."""
        own = model.runner
        kept = KeptStates(KEPT_STEPS if isinstance(own, DeviceRunner) else None)
        watched = replace(own, kept=kept, wants=own.wants._replace(requests=True))
        sizes = self.stored.head_values, self.itemsize
        return watched, HeadsRunner(self.heads, own.model, kept, *sizes, own.follows_trees)


def load_heads(config: LoadConfig, arithmetic: Arithmetic, company: Company) -> LoadedHeads | None:
    """Load the heads that a configuration names; None: it names none. Raises CannotSplit for an engine of several
    ranks."""
    if config.heads is None:
        return None
    if company.divided:
        raise CannotSplit("a model that is divided among ranks has no heads")
    checkpoint = inspect_checkpoint(config.model).for_quantization(config.quantization)
    stored = inspect_heads(config.heads, checkpoint)
    if isinstance(stored, StoredLayer):
        return load_layer(stored, arithmetic)
    assert isinstance(stored, StoredMedusa), "heads of a kind that was inspected"
    heads = MedusaHeads.load(stored, arithmetic.dtype, arithmetic.device)
    return LoadedMedusa(stored, heads, arithmetic.dtype.itemsize, arithmetic.device.type == "cuda")


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
