"""The setting of a job: its numerics, the placement of its engines, and their other parts."""

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
    """How and where a job runs."""

    numerics: Numerics
    placement: Placement
    parts: EngineParts = field(default_factory=EngineParts)

    @property
    def device(self) -> Device:
        """Return the device of the engines."""
        return self.numerics.device

    def for_rows(self, rows: int) -> Setting:
        """Return the setting with at most one engine per row."""
        return replace(self, placement=self.placement.for_rows(rows))

    def with_placement(self, **changes: Any) -> Setting:
        """Return the setting with a changed placement."""
        return replace(self, placement=replace(self.placement, **changes))

    def with_numerics(self, **changes: Any) -> Setting:
        """Return the setting with changed numerics."""
        return replace(self, numerics=replace(self.numerics, **changes))

    def with_parts(self, **changes: Any) -> Setting:
        """Return the setting with changed engine parts."""
        return replace(self, parts=replace(self.parts, **changes))

    @property
    def facts(self) -> dict[str, Any]:
        """Return the setting as columns of the run table, without the hardware."""
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
        """Return the peaks of one engine in this arithmetic, or None if unknown."""
        return self.placement.peaks(self.numerics.dtype, self.numerics.quantization)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of device memory that adapters take."""
        return self.parts.adapter_bytes(self.placement.hardware, self.numerics.itemsize)

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """Return the cost of the model's steps, adapters included."""
        found, sizes = self.numerics.model_cost(checkpoint), self.parts.adapter_sizes
        return found if sizes is None else sizes.with_cost(found)

    def load_config(self, job: Job) -> LoadConfig:
        """Return how the first engine loads its weights."""
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
            draft_model=parts.beside,
            heads=parts.heads_folder(job),
            experts=None if parts.experts is None else parts.experts.placement,
        )

    def engine_config(self, job: Job, longest: int, logprobs: int | None = None) -> EngineConfig:
        """Return the configuration of the first engine.

        Args:
            job: The job.
            longest: Tokens of the longest sequence, prompt and output.
            logprobs: Maximum number of log-probabilities that a sequence asks for.
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
    """A model and its setting."""

    checkpoint: StoredModel
    setting: Setting

    @property
    def cost(self) -> ModelCost:
        """Return the cost of the model's steps."""
        return self.setting.model_cost(self.checkpoint)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the loaded weights, without adapters."""
        if not isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint.weight_bytes
        spec = self.checkpoint.spec.quantized(self.setting.numerics.quantization)
        return loaded_bytes(spec, self.checkpoint.parameters, self.setting.numerics.itemsize)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the loaded weights, adapters included."""
        return self.held_bytes + self.setting.adapter_bytes


def engine_weights(models: list[PlacedModel]) -> int:
    """Return the weight bytes of an engine: the job's model, its adapters and heads, and a draft model."""
    setting, own = models[0].setting, sum(model.weight_bytes for model in models)
    heads = setting.parts.heads
    return own if heads is None else own + heads.weight_bytes(setting.numerics.itemsize)


def _chosen(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
