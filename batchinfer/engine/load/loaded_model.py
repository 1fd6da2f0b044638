"""A model that is ready to run, of which engines are made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.core.samples import DraftName
from batchinfer.engine.config import EngineInfo
from batchinfer.engine.drafts.medusa import HeadsRunner
from batchinfer.engine.drafts.model_beside import BesideRunner
from batchinfer.engine.drafts.sources import drafter_of
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.drafting import Drafter
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.loop.repeated_steps import RepeatedSteps
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.runner import Runner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.engine.tensors.graph_sizes import GraphSteps
from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import Peaks

AnyBeside = BesideRunner | HeadsRunner


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device with its KV cache tensors: all of an engine that is slow to make."""

    runner: ModelRunner
    limits: SchedulerConfig
    engine_limits: EngineLimits
    info: EngineInfo
    expert_loads: ExpertLoads
    masks: ConstraintMasks | None = None
    drafts: tuple[DraftName, ...] = ()  # the sources that may be asked, where peaks are known
    beside: AnyBeside | None = None  # a draft model, or heads, which may be asked, too
    turns: int = (
        1  # engines that it is made for at a time, each with such limits, and with a part of the cache
    )

    @property
    def _graphs(self) -> GraphSteps | None:
        """The steps that are replayed as a whole, if any are."""
        runner = self.runner
        return runner.graphs.steps if isinstance(runner, DeviceRunner) and runner.graphs else None

    @property
    def runners(self) -> list[ModelRunner]:
        """Make a runner for each of the engines that take turns."""
        if self.turns == 1:
            return [self.runner]
        blocks = self.info.blocks // self.turns
        return [self.runner.in_turn(turn * blocks) for turn in range(self.turns)]

    def engine(
        self,
        peaks: Peaks | None = None,
        stop_streams: StopStreams | None = None,
        runner: Runner | None = None,
        drafter: Drafter | None = None,
    ) -> Engine:
        """Make an engine whose cache holds nothing yet. Only the newest one of a model may be stepped: they share
        the cache tensors. `runner` and `drafter` stand in for the model's own.
        """
        windows = self.runner.layout.sizes.windows
        pool = BlockPool(self.info.blocks // self.turns, self.info.block_size, len(windows))
        scheduler = Scheduler(self.limits, pool, windows=windows)
        limits = self.engine_limits
        runner = runner or self.runner
        drafter = drafter or drafter_of(
            self.drafts, runner, peaks, self.limits.max_num_seqs, self.beside, self._graphs
        )
        # A runner that keeps the states of sampled rows for heads has those of each step
        repeats = runner.wants.repeats and self.beside is None and self.runner.kept is None
        costs = self.limits.admission_costs
        repeated = RepeatedSteps(costs) if repeats and costs is not None else None
        return Engine(
            runner,
            scheduler,
            limits,
            peaks,
            stop_streams,
            drafter=drafter,
            masks=self.masks,
            repeated=repeated,
        )


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
