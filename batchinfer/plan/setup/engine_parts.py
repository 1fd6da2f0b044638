"""Parts of a job's engines in addition to its model: adapters, a draft model or heads, expert placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.samples import DraftName
from batchinfer.engine.config import DraftModelConfig
from batchinfer.job import Job
from batchinfer.job.field_types import AUTO_DRAFTS
from batchinfer.job.spec import DraftModelSection
from batchinfer.machine.hardware import Hardware
from batchinfer.models.adapters.sizes import AdapterSizes
from batchinfer.models.heads.stored_heads import StoredHeads
from batchinfer.plan.expert_plan import ExpertPlan

# Share of GPU memory for adapters: with rank 16 on all modules of an 8B model, about 60 adapters on an H100
ADAPTERS_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Parts of engines in addition to the job's model. None means that there is no such part."""

    weights: Path | None = None  # calibrated checkpoint of the job's model
    adapters: tuple[tuple[str, Path], ...] = ()  # (fingerprint, folder) of each adapter
    adapter_sizes: AdapterSizes | None = None  # excludes adapters that are merged into the weights
    beside: DraftModelConfig | None = None  # draft model in the same engines
    heads: StoredHeads | None = None  # draft heads of the job's model
    experts: ExpertPlan | None = None  # experts of each rank
    shares_prefixes: bool = True  # prompts may reuse cached blocks of other prompts

    def heads_folder(self, job: Job) -> Path | None:
        """Return the folder of the draft heads, or None."""
        drafts = job.drafts
        return drafts.heads if self.heads is not None and isinstance(drafts, DraftModelSection) else None

    def draft_sources(self, job: Job) -> tuple[DraftName, ...]:
        """Return the draft sources of the engines."""
        return AUTO_DRAFTS if self.beside is not None else job.draft_sources

    def adapter_slots(self, hardware: Hardware, itemsize: int) -> int | None:
        """Return the maximum number of adapters on a GPU at a time, or None if all fit."""
        sizes, memory = self.adapter_sizes, hardware.memory_bytes
        if sizes is None or hardware.device == "cpu" or memory is None:
            return None
        return sizes.slots(int(memory * ADAPTERS_SHARE), itemsize)

    def adapter_bytes(self, hardware: Hardware, itemsize: int) -> int:
        """Return the bytes of device memory that adapters take."""
        sizes, places = self.adapter_sizes, self.adapter_slots(hardware, itemsize)
        if sizes is None:
            return 0
        if hardware.device == "cpu":
            return sizes.values * itemsize
        return sizes.slot_values * ((sizes.count if places is None else places) + 1) * itemsize
