"""Parts of a job's engines in addition to its model: adapters, a draft model or heads, expert placement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.samples import DraftSourceName
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
    """The parts of a job's engines in addition to the job's model. None means that there is no such part.

    Attributes:
        weights: Folder of the calibrated int4 weights, which are loaded instead of the checkpoint's weights.
        adapters: Pairs of the fingerprint and the folder of each adapter.
        adapter_sizes: Sizes of the adapters that are not merged into the weights. None without such adapters.
        draft_model: Draft model that runs in the same engines.
        heads: Draft heads of the job's model.
        experts: The assignment of experts to ranks.
        shares_prefixes: Whether prompts may reuse cached blocks of other prompts.
    """

    weights: Path | None = None
    adapters: tuple[tuple[str, Path], ...] = ()
    adapter_sizes: AdapterSizes | None = None
    draft_model: DraftModelConfig | None = None
    heads: StoredHeads | None = None
    experts: ExpertPlan | None = None
    shares_prefixes: bool = True

    def heads_folder(self, job: Job) -> Path | None:
        """Return the folder of the job's draft heads, or None without heads."""
        drafts = job.drafts
        return drafts.heads if self.heads is not None and isinstance(drafts, DraftModelSection) else None

    def draft_sources(self, job: Job) -> tuple[DraftSourceName, ...]:
        """Return the names of the draft sources that the job's engines use."""
        return AUTO_DRAFTS if self.draft_model is not None else job.draft_sources

    def adapter_slots(self, hardware: Hardware, itemsize: int) -> int | None:
        """Return how many adapters a GPU can hold at the same time.

        Returns None without adapters, on a CPU, and if the GPU's memory is unknown. Then all adapters are loaded.

        Args:
            hardware: The GPU or CPU.
            itemsize: Bytes of a value of an adapter.
        """
        sizes, memory = self.adapter_sizes, hardware.memory_bytes
        if sizes is None or hardware.device == "cpu" or memory is None:
            return None
        return sizes.slots(int(memory * ADAPTERS_SHARE), itemsize)

    def adapter_bytes(self, hardware: Hardware, itemsize: int) -> int:
        """Return the bytes of the device's memory that adapters take in an engine. 0 if there are no adapters.

        Args:
            hardware: The GPU or CPU.
            itemsize: Bytes of a value of an adapter.
        """
        sizes, places = self.adapter_sizes, self.adapter_slots(hardware, itemsize)
        if sizes is None:
            return 0
        if hardware.device == "cpu":
            return sizes.values * itemsize
        return sizes.slot_values * ((sizes.count if places is None else places) + 1) * itemsize
