"""A loaded model with its KV cache, from which engines are created."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.core.samples import DraftName
from batchinfer.engine.config import EngineInfo
from batchinfer.engine.drafts.draft_model import DraftModelRunner
from batchinfer.engine.drafts.medusa import MedusaRunner
from batchinfer.engine.drafts.sources import make_drafter
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.drafting import Drafter
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.loop.multi_step import MultiStepDecoding
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

AnyProposer = DraftModelRunner | MedusaRunner


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device with its KV cache. Creating an engine from it is fast."""

    runner: ModelRunner
    limits: SchedulerConfig
    engine_limits: EngineLimits
    info: EngineInfo
    expert_loads: ExpertLoads
    masks: ConstraintMasks | None = None
    drafts: tuple[DraftName, ...] = ()  # draft sources; used only if the device's peaks are known
    proposer: AnyProposer | None = None  # a draft model or draft heads
    # Engines that take turns (pipeline parallelism), each with these limits and a share of the cache
    turns: int = 1

    @property
    def _graphs(self) -> GraphSteps | None:
        """Return the sizes of decode steps that have CUDA graphs, or None if there are none."""
        runner = self.runner
        return runner.graphs.steps if isinstance(runner, DeviceRunner) and runner.graphs else None

    @property
    def runners(self) -> list[ModelRunner]:
        """Return a runner for each of the engines that take turns."""
        if self.turns == 1:
            return [self.runner]
        blocks = self.info.blocks // self.turns
        return [self.runner.with_first_block(turn * blocks) for turn in range(self.turns)]

    def engine(
        self,
        peaks: Peaks | None = None,
        stop_streams: StopStreams | None = None,
        runner: Runner | None = None,
        drafter: Drafter | None = None,
    ) -> Engine:
        """Create an engine with an empty cache.

        Engines of one model share the cache tensors: only the latest one may run.

        Args:
            peaks: The peak speeds of the device; without them, drafts are not used.
            stop_streams: Finds stop strings in the answers.
            runner: Replaces the model's runner.
            drafter: Replaces the drafter for `drafts`.
        """
        windows = self.runner.layout.sizes.windows
        pool = BlockPool(self.info.blocks // self.turns, self.info.block_size, len(windows))
        scheduler = Scheduler(self.limits, pool, windows=windows)
        limits = self.engine_limits
        runner = runner or self.runner
        drafter = drafter or make_drafter(
            self.drafts, runner, peaks, self.limits.max_num_seqs, self.proposer, self._graphs
        )
        # Draft heads need the states of every step, so steps are not launched together
        repeats = runner.wants.repeats and self.proposer is None and self.runner.kept is None
        costs = self.limits.admission_costs
        repeated = MultiStepDecoding(costs) if repeats and costs is not None else None
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
    """A model with its KV cache, as the input of `LoadedHeads.of`."""

    runner: ModelRunner
    spec: ModelSpec | ForeignSpec
    limits: SchedulerConfig
    blocks: int  # of the KV cache
    longest: int  # tokens of the longest sequence
    masks: ConstraintMasks | None


class LoadedHeads(ABC):
    """Draft heads that were trained for the engine's model."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Return the bytes of their weights."""

    def block_bytes(self, block_size: int) -> int:
        """Return their bytes per block of the KV cache."""
        return 0

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return their bytes that do not depend on the number of cache blocks, without weights."""
        return 0

    def tapped_runner(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a runner, without a cache, whose model keeps the states that the heads read per cache slot.

        Args:
            own: The runner of the model.
            longest: Tokens of the longest sequence.
            max_num_seqs: The most sequences that run at once.

        Raises:
            Unavailable: The heads do not support this model.
        """
        return own

    @abstractmethod
    def of(self, model: HeadedModel) -> tuple[ModelRunner, AnyProposer]:
        """Return the runner that the engine uses, and the runner that proposes draft tokens.

        Args:
            model: The model; its runner comes from `tapped_runner` and has a cache.

        Raises:
            OutOfMemory: The cache of the heads does not fit.
        """
