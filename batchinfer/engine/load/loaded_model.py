"""A loaded model with its KV cache, from which engines are created."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from batchinfer.core.samples import DraftSourceName
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
    """A model on its device with its KV cache, from which an engine is created without loading anything.

    Attributes:
        runner: Runs the model.
        limits: The limits of the scheduler.
        engine_limits: The maximum length of sequences and the end-of-sequence tokens.
        info: The properties of the engine.
        expert_loads: Counts the tokens that are routed to each expert.
        masks: The token masks of constraints. None if no row of the job can have a constraint.
        drafts: The names of the draft sources. They are used only if the peaks of the device are known.
        proposer: Runs the draft model or the draft heads. None: the job has neither.
        turns: The number of engines that alternate on the model (pipeline parallelism). They share the KV cache, and
            `limits` apply to each of them.
    """

    runner: ModelRunner
    limits: SchedulerConfig
    engine_limits: EngineLimits
    info: EngineInfo
    expert_loads: ExpertLoads
    masks: ConstraintMasks | None = None
    drafts: tuple[DraftSourceName, ...] = ()
    proposer: AnyProposer | None = None
    turns: int = 1

    @property
    def _graphs(self) -> GraphSteps | None:
        runner = self.runner
        return runner.graphs.steps if isinstance(runner, DeviceRunner) and runner.graphs else None

    @property
    def runners(self) -> list[ModelRunner]:
        """A runner for each of the alternating engines (pipeline parallelism), each with its own part of the KV cache.

        Without alternating engines, the list has one runner.
        """
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
        """Create an engine with an empty KV cache.

        All engines of a model use the same cache tensors. Only the newest engine may run, unless each engine was
        created with its own runner from `runners`.

        Args:
            peaks: The peak FLOP/s and bandwidth of the device. None: drafts are not used.
            stop_streams: Creates the function that searches an answer for stop strings. None: no row has stop strings.
            runner: The runner to use. None: the model's runner.
            drafter: Chooses the drafts of each step. None: a drafter for the model's draft sources is created.
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
    """A target model with its KV cache, for which draft heads are set up.

    Attributes:
        runner: Runs the model.
        spec: The specification of the model.
        limits: The limits of the scheduler.
        blocks: The number of KV cache blocks.
        longest: The number of tokens of the longest sequence.
        masks: The token masks of constraints. None if no row of the job can have a constraint.
    """

    runner: ModelRunner
    spec: ModelSpec | ForeignSpec
    limits: SchedulerConfig
    blocks: int
    longest: int
    masks: ConstraintMasks | None


class LoadedHeads(ABC):
    """Loaded draft heads, which were trained for the engine's model."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """The number of bytes of the draft heads' weights."""

    def block_bytes(self, block_size: int) -> int:
        """Return the number of bytes that the draft heads need per block of the target model's KV cache; 0 by default.

        Args:
            block_size: The number of tokens per block.
        """
        return 0

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the number of bytes that the draft heads need besides weights and `block_bytes`; 0 by default.

        The result does not depend on the number of KV cache blocks.

        Args:
            block_size: The number of tokens per block.
            max_num_seqs: Maximum number of running sequences.
        """
        return 0

    def tapped_runner(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a copy of the target model's runner whose model also stores the hidden states that draft heads read.

        By default, the runner itself is returned.

        Args:
            own: The runner of the target model, without a KV cache.
            longest: The number of tokens of the longest sequence.
            max_num_seqs: Maximum number of running sequences.

        Raises:
            Unavailable: The heads do not support this model.
        """
        return own

    @abstractmethod
    def of(self, model: HeadedModel) -> tuple[ModelRunner, AnyProposer]:
        """Allocate the KV cache of the draft heads, if they need one, and return the runners that the engine uses.

        Args:
            model: The target model with its KV cache. Its runner was returned by `tapped_runner`.

        Returns:
            The runner of the target model, and the runner of the draft heads.

        Raises:
            OutOfMemory: The KV cache of the heads does not fit.
        """
