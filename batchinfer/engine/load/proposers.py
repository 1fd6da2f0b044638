"""Loads the draft model or the draft heads of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.medusa import MedusaHeads, MedusaRunner
from batchinfer.engine.load.device_fit import FittedRunner
from batchinfer.engine.load.draft_model import DraftModelWeights, load_draft_model
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_model import AnyProposer, HeadedModel, LoadedHeads
from batchinfer.engine.ranks.rank_groups import RankGroups
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
    """Loaded Medusa heads. They read only the hidden states of sampled tokens and have no KV cache.

    Attributes:
        stored: The checkpoint of the heads.
        heads: The weights of the heads.
        itemsize: The number of bytes per weight.
        on_gpu: True if the heads are on a GPU.
    """

    stored: StoredMedusa
    heads: MedusaHeads
    itemsize: int
    on_gpu: bool = False

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of the Medusa heads' weights."""
        return self.stored.weight_bytes(self.itemsize)

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the number of bytes of the hidden states that are stored on a GPU for the heads; 0 on a CPU.

        Args:
            block_size: Ignored.
            max_num_seqs: Maximum number of running sequences.
        """
        return self.stored.state_bytes(kept_rows(max_num_seqs), self.itemsize) if self.on_gpu else 0

    def of(self, model: HeadedModel) -> tuple[ModelRunner, MedusaRunner]:
        """Create the runner of the Medusa heads, and make the target model's runner store the states that they read.

        Args:
            model: The target model with its KV cache.

        Returns:
            The runner of the target model, and the runner of the heads.
        """
        own = model.runner
        kept = KeptStates(KEPT_STEPS if isinstance(own, DeviceRunner) else None)
        runner = replace(own, kept=kept, wants=own.wants._replace(requests=True))
        sizes = self.stored.head_values, self.itemsize
        return runner, MedusaRunner(self.heads, own.model, kept, *sizes, own.follows_trees)


def load_heads(config: LoadConfig, arithmetic: Arithmetic, rank_groups: RankGroups) -> LoadedHeads | None:
    """Load the draft heads of an engine, or return None if no draft heads are configured.

    Args:
        config: The settings for loading.
        arithmetic: The dtype and device of the target model.
        rank_groups: The ranks of the engine.

    Raises:
        CannotSplit: The target model is sharded.
    """
    if config.heads is None:
        return None
    if rank_groups.is_sharded:
        raise CannotSplit("draft heads are not supported with a model that is sharded across ranks")
    checkpoint = inspect_checkpoint(config.model).for_quantization(config.quantization)
    stored = inspect_heads(config.heads, checkpoint)
    if isinstance(stored, StoredLayer):
        return load_layer(stored, arithmetic)
    assert isinstance(stored, StoredMedusa), "inspect_heads returns no other kind"
    heads = MedusaHeads.load(stored, arithmetic.dtype, arithmetic.device)
    return LoadedMedusa(stored, heads, arithmetic.dtype.itemsize, arithmetic.device.type == "cuda")


@dataclass(frozen=True, slots=True)
class Proposers:
    """The loaded draft model or the loaded draft heads of an engine.

    Attributes:
        draft_model: The draft model. None: the engine has none.
        heads: The draft heads. None: the engine has none. An engine never has both.
    """

    draft_model: DraftModelWeights | None = None
    heads: LoadedHeads | None = None

    @property
    def loaded(self) -> LoadedHeads | DraftModelWeights | None:
        """The draft heads or the draft model, or None if the engine has neither."""
        return self.heads or self.draft_model

    def tapped_runner(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a copy of the target model's runner whose model also stores the hidden states that draft heads read.

        Without draft heads, the runner itself is returned.

        Args:
            own: The runner of the target model, without a KV cache.
            longest: The number of tokens of the longest sequence.
            max_num_seqs: Maximum number of running sequences.
        """
        return own if self.heads is None else self.heads.tapped_runner(own, longest, max_num_seqs)

    def of(
        self, source: Source, fitted: FittedRunner, longest: int, masks: ConstraintMasks | None
    ) -> tuple[ModelRunner, AnyProposer | None]:
        """Return the runner of the target model that the engine uses, and the runner of the draft model or draft heads.

        Args:
            source: The checkpoint of the target model.
            fitted: The target model's runner with its KV cache and limits.
            longest: The number of tokens of the longest sequence.
            masks: The token masks of constraints. None if no row of the job can have a constraint.

        Returns:
            Two runners. The second one is None if the engine has neither a draft model nor draft heads.
        """
        runner, limits, blocks = fitted.runner, fitted.limits, fitted.blocks
        if self.heads is not None:
            return self.heads.of(HeadedModel(runner, source.spec, limits, blocks, longest, masks))
        if self.draft_model is None:
            return runner, None
        return runner, self.draft_model.runner(runner, source.spec, limits, blocks, longest, masks)


def load_proposers(
    config: LoadConfig, arithmetic: Arithmetic, device: torch.device, rank_groups: RankGroups
) -> Proposers:
    """Load the draft model or the draft heads of an engine, if any is configured.

    Args:
        config: The settings for loading.
        arithmetic: The dtype and device of the target model.
        device: The device of the target model.
        rank_groups: The ranks of the engine.

    Raises:
        CannotSplit: The target model is sharded. Errors of loading a checkpoint are raised as well.
    """
    return Proposers(
        load_draft_model(config, device, rank_groups), load_heads(config, arithmetic, rank_groups)
    )
