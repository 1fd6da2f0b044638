"""Loads heads that were trained for an engine's model, and has its runner keep the states that they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.medusa import HeadsRunner, MedusaHeads
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_heads import HeadedModel, LoadedHeads
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.tensors.graph_sizes import KEPT_STEPS, kept_rows
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_heads import StoredLayer
from batchinfer.models.heads.stored_medusa import StoredMedusa
from batchinfer.models.ops.choose import Arithmetic


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
    checkpoint = inspect_checkpoint(config.model).held_for(config.quantization)
    stored = inspect_heads(config.heads, checkpoint)
    if isinstance(stored, StoredLayer):
        return load_layer(stored, arithmetic)
    assert isinstance(stored, StoredMedusa), "heads of a kind that was inspected"
    heads = MedusaHeads.load(stored, arithmetic.dtype, arithmetic.device)
    return LoadedMedusa(stored, heads, arithmetic.dtype.itemsize, arithmetic.device.type == "cuda")
