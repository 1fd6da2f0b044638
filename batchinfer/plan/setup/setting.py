"""The setting of a job: its numerics, the placement of its engines, and parts such as adapters and draft models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.plan.setup.engine_parts import EngineParts
from batchinfer.plan.setup.numerics import Numerics
from batchinfer.plan.setup.placement import Placement
from batchinfer_kernels.arithmetic import Device
from batchinfer_kernels.cost import ModelCost, Peaks


@dataclass(frozen=True, slots=True)
class Setting:
    """All choices that a run makes before it reads rows.

    Attributes:
        numerics: Arithmetic and maximum length.
        placement: The engines, and the machine and GPUs on which they run.
        parts: Parts of engines in addition to the job's model.
    """

    numerics: Numerics
    placement: Placement
    parts: EngineParts = field(default_factory=EngineParts)

    @property
    def device(self) -> Device:
        """Return the device of the engines, "cpu" or "cuda"."""
        return self.numerics.device

    def for_rows(self, rows: int) -> Setting:
        """Return a copy with at most one engine per row to run, and at least one engine.

        Args:
            rows: Number of rows to run.
        """
        return replace(self, placement=self.placement.for_rows(rows))

    def with_placement(self, **changes: Any) -> Setting:
        """Return a copy of the setting with new values of some fields of `placement`.

        Args:
            changes: New values, by name of the field of `Placement`.
        """
        return replace(self, placement=replace(self.placement, **changes))

    def with_numerics(self, **changes: Any) -> Setting:
        """Return a copy of the setting with new values of some fields of `numerics`.

        Args:
            changes: New values, by name of the field of `Numerics`.
        """
        return replace(self, numerics=replace(self.numerics, **changes))

    def with_parts(self, **changes: Any) -> Setting:
        """Return a copy of the setting with new values of some fields of `parts`.

        Args:
            changes: New values, by name of the field of `EngineParts`.
        """
        return replace(self, parts=replace(self.parts, **changes))

    @property
    def facts(self) -> dict[str, Any]:
        """Return the setting as values by column of the run table, without the columns of the hardware."""
        numerics, placement = self.numerics, self.placement
        return {
            "dtype": numerics.dtype,
            "quantization": numerics.quantization,
            "kv_cache_dtype": numerics.kv_cache,
            "deterministic": numerics.deterministic,
            "replicas": placement.replicas,
            "ranks": placement.division.ranks,
            "machines": 1,
        }

    @property
    def peaks(self) -> Peaks | None:
        """Return the peak FLOP/s and bandwidth of one engine in the setting's arithmetic, or None if unknown."""
        return self.placement.peaks(self.numerics.dtype, self.numerics.quantization)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of device memory that adapters take in an engine."""
        return self.parts.adapter_bytes(self.placement.hardware, self.numerics.itemsize)

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """Return the FLOPs and bytes of the steps of a model with this arithmetic and these adapters."""
        found, sizes = self.numerics.model_cost(checkpoint), self.parts.adapter_sizes
        return found if sizes is None else sizes.with_cost(found)

    def load_config(self, job: Job) -> LoadConfig:
        """Return the configuration with which the job's first engine loads its weights."""
        numerics, placement, parts = self.numerics, self.placement, self.parts
        threads = _chosen(job.engine.threads)
        return LoadConfig(
            model=parts.weights or job.model.path,
            dtype=numerics.dtype,
            device=numerics.device,
            threads=threads if placement.processes_here == 1 else placement.thread_shares(threads)[0],
            quantization=numerics.quantization,
            deterministic=numerics.deterministic,
            tiles=numerics.tiles,
            kv_cache=numerics.kv_cache,
            adapters=parts.adapters,
            adapter_slots=parts.adapter_slots(placement.hardware, numerics.itemsize),
            draft_model=parts.draft_model,
            heads=parts.heads_folder(job),
            experts=None if parts.experts is None else parts.experts.placement,
        )

    def engine_config(self, job: Job, longest: int, logprobs: int | None = None) -> EngineConfig:
        """Return the configuration of the job's first engine.

        Args:
            job: The job.
            longest: Maximum number of tokens of a sequence, prompt and output.
            logprobs: Largest number of log-probabilities per token that a request asks for. None: no request asks for
                any.
        """
        engine, engines = job.engine, self.placement.engines_here
        shared = engines > 1 and self.device == "cpu"
        kv_memory = None if engine.kv_memory == "auto" else engine.kv_memory
        return EngineConfig(
            self.load_config(job),
            max_model_len=self.numerics.max_model_len,
            longest=longest,
            max_num_seqs=_chosen(engine.max_num_seqs),
            max_num_batched_tokens=_chosen(engine.max_num_batched_tokens),
            block_size=_chosen(engine.block_size),
            kv_memory=kv_memory // engines if shared and isinstance(kv_memory, int) else kv_memory,
            prefix_caching=engine.enable_prefix_caching and self.parts.shares_prefixes,
            memory=self.placement.free_memory // engines if shared else None,
            peaks=self.peaks,
            logprobs=logprobs,
            drafts=self.parts.draft_sources(job),
        )


class PlacedModel(NamedTuple):
    """A model and its setting.

    Attributes:
        checkpoint: The model.
        setting: Device, dtype, memory and parallelism of the model.
    """

    checkpoint: StoredModel
    setting: Setting

    @property
    def cost(self) -> ModelCost:
        """Return the FLOPs and bytes of the model's steps, adapters included."""
        return self.setting.model_cost(self.checkpoint)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the model's weights in memory, without adapters."""
        if not isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint.weight_bytes
        spec = self.checkpoint.spec.quantized(self.setting.numerics.quantization)
        return loaded_bytes(spec, self.checkpoint.parameters, self.setting.numerics.itemsize)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the model's weights in memory, adapters included."""
        return self.held_bytes + self.setting.adapter_bytes


def engine_weights(models: list[PlacedModel]) -> int:
    """Return the bytes of all weights of an engine, adapters and draft heads included.

    Args:
        models: The job's model, and a draft model in the same engine, if any.
    """
    setting, own = models[0].setting, sum(model.weight_bytes for model in models)
    heads = setting.parts.heads
    return own if heads is None else own + heads.weight_bytes(setting.numerics.itemsize)


def _chosen(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
