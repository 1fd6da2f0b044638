"""Loads heads that were trained for an engine's model, and has its runner keep the states that they read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import CannotSplit, Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.heads_beside import HeadsRunner
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.heads.medusa import MedusaHeads
from batchinfer.models.heads.stored_heads import StoredHeads


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHeads:
    """Heads on the device of the engine's model."""

    stored: StoredHeads
    heads: MedusaHeads
    itemsize: int

    @property
    def weight_bytes(self) -> int:
        return self.stored.weight_bytes(self.itemsize)

    def watching(self, runner: ModelRunner) -> ModelRunner:
        """Return the runner, which then keeps its hidden states."""
        return replace(runner, kept=KeptStates(), wants=runner.wants._replace(requests=True))

    def runner(self, own: ModelRunner) -> HeadsRunner:
        """Return what proposes from the states that the engine's runner keeps."""
        assert own.kept is not None, "it watches the runner"
        return HeadsRunner(self.heads, own.model, own.kept, self.stored.head_values, self.itemsize)


def load_heads(config: LoadConfig, arithmetic: Arithmetic, company: Company) -> LoadedHeads | None:
    """Load the heads that a configuration names; None: it names none. Raises CannotSplit for an engine of several
    ranks, and Unavailable on a GPU."""
    if config.heads is None:
        return None
    if company.divided:
        raise CannotSplit("a model that is divided among ranks has no heads")
    if arithmetic.device.type != "cpu":
        raise Unavailable("heads run on a CPU alone as yet")
    heads = MedusaHeads.load(config.heads, arithmetic.dtype, arithmetic.device)
    return LoadedHeads(config.heads, heads, arithmetic.dtype.itemsize)
