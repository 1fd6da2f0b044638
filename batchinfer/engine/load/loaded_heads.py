"""The base of heads on the device of an engine's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from batchinfer.engine.load.loaded_model import AnyBeside
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.spec.spec import ModelSpec


class HeadedModel(NamedTuple):
    """The runner of an engine whose model has heads, before it keeps what they read."""

    runner: ModelRunner
    spec: ModelSpec | ForeignSpec
    limits: SchedulerConfig
    blocks: int  # of its cache
    longest: int  # tokens of a sequence
    masks: ConstraintMasks | None


class LoadedHeads(ABC):
    """Heads that were trained for an engine's model."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes of their weights."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that each block of the cache takes for them."""
        return 0

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the bytes that they keep in no block of a row."""
        return 0

    def watching(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a runner, which has no cache yet, that leaves in its blocks what they read of tokens. Raises
        Unavailable for a model whose blocks cannot be shared."""
        return own

    @abstractmethod
    def of(self, model: HeadedModel) -> tuple[ModelRunner, AnyBeside]:
        """Make a runner that keeps the states that they read, and what proposes from these. The model's runner is that
        of `watching`, with its cache. Raises OutOfMemory."""
