"""Loads heads that were trained for an engine's model, and has its runner keep the states that they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit, Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.heads_beside import HeadsRunner
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_heads import HeadedModel, LoadedHeads
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.medusa import MedusaHeads
from batchinfer.models.heads.stored_heads import StoredLayer
from batchinfer.models.heads.stored_medusa import StoredMedusa


@dataclass(frozen=True, slots=True, eq=False)
class LoadedMedusa(LoadedHeads):
    """Medusa heads, which read the states of sampled tokens alone, and keep nothing."""

    stored: StoredMedusa
    heads: MedusaHeads
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of their weights."""
        return self.stored.weight_bytes(self.itemsize)

    def of(self, model: HeadedModel) -> tuple[ModelRunner, HeadsRunner]:
        """Make a runner that keeps its hidden states, and what proposes from these."""
        own, kept = model.runner, KeptStates()
        watched = replace(own, kept=kept, wants=own.wants._replace(requests=True))
        return watched, HeadsRunner(self.heads, own.model, kept, self.stored.head_values, self.itemsize)


def load_heads(config: LoadConfig, arithmetic: Arithmetic, company: Company) -> LoadedHeads | None:
    """Load the heads that a configuration names; None: it names none. Raises CannotSplit for an engine of several
    ranks, and Unavailable on a GPU."""
    if config.heads is None:
        return None
    if company.divided:
        raise CannotSplit("a model that is divided among ranks has no heads")
    if arithmetic.device.type != "cpu":
        raise Unavailable("heads run on a CPU alone as yet")
    checkpoint = inspect_checkpoint(config.model).held_for(config.quantization)
    stored = inspect_heads(config.heads, checkpoint)
    if isinstance(stored, StoredLayer):
        return load_layer(stored, arithmetic)
    assert isinstance(stored, StoredMedusa), "heads of a kind that was inspected"
    heads = MedusaHeads.load(stored, arithmetic.dtype, arithmetic.device)
    return LoadedMedusa(stored, heads, arithmetic.dtype.itemsize)
