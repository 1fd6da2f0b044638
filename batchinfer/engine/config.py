"""The settings that an engine is built from. Plain values, so that they can be sent to the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import DraftName
from batchinfer.engine.ranks.seat import UNDIVIDED, Division
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import Peaks

# More rows share the reading of the weights; a CPU is bound by computing before that (docs/measurements/scheduling.md)
DEFAULT_MAX_NUM_SEQS = {"cpu": 256, "cuda": 1024}
DEFAULT_BLOCK_SIZE = 16
REQUEST_BATCH = 512  # requests that are handed to an engine at once
# Times max_num_seqs: enough that the engine never waits for requests, little enough to stay bounded
_QUEUED = 3

# What is done inside takes as long as it takes, and whoever watches the engine does not take it for a hang.
Untimed = Callable[[], AbstractContextManager[object]]

# Makes a choice that all engines of a run share: calls the function in one of them, and returns what it chose in all.
Agreed = Callable[[Callable[[], str]], str]
NOTHING = "{}"  # a choice of nothing: an engine died while it chose


def alone(choose: Callable[[], str]) -> str:
    """Choose for an engine that shares its choices with no other."""
    return choose()


def most_queued(max_num_seqs: int) -> int:
    """How many unfinished requests an engine has at a time, while there are more."""
    return max(REQUEST_BATCH, _QUEUED * max_num_seqs)


@dataclass(frozen=True, slots=True)
class BesideConfig:
    """A draft model that an engine has beside its own."""

    model: Path
    dtype: Dtype
    quantization: Quantization = "none"
    kv_cache: KvCacheDtype = "auto"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Settings that loading the weights needs: they are known before a row is read."""

    model: Path
    dtype: Dtype
    device: Device
    threads: int | None = None  # None: the engine chooses
    quantization: Quantization = "none"
    deterministic: bool = False  # a row's numbers depend on nothing but the row
    tiles: bool = False  # whether the bits of a deterministic run on a CPU are those of matrix tiles
    kv_cache: KvCacheDtype = "auto"  # which operators can be used depends on it
    adapters: tuple[tuple[str, Path], ...] = ()  # the fingerprints of adapters, and their folders
    adapter_places: int | None = None  # how many of them are on the device at a time; None: all
    beside: BesideConfig | None = None  # a smaller model, which proposes tokens; None: there is none
    heads: Path | None = None  # the folder of heads of the model, which propose tokens; None: there are none
    experts: ExpertPlacement | None = None  # the whole experts of ranks that divide these; None: ranges


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of an engine whose weights are loaded as `load` says: some of the others are known once there is a plan.
    None where the engine chooses the value itself."""

    load: LoadConfig
    max_model_len: int
    longest: int  # tokens (prompt and output) of the job's longest sequence: none that runs may be longer
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_memory: int | float | None = None  # bytes, or the share of the memory left once the weights are loaded
    prefix_caching: bool = True
    # Bytes of a CPU's memory for this engine, its weights included; None: what is free
    memory: int | None = None
    peaks: Peaks | None = None  # of this engine, where several share a CPU
    logprobs: int | None = None  # the most log-probabilities a token that a row asks for; None: no row asks
    drafts: tuple[
        DraftName, ...
    ] = ()  # where drafts come from, as far as they pay; none: every step gives one token


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describes the engine that was built, for the report and for the feeder, which keeps enough requests queued."""

    ops: str
    device: str
    dtype: str
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    blocks: int
    kv_bytes: int
    weight_bytes: int
    quantization: str = "none"
    deterministic: bool = False
    linear: str = ""  # how the linear layers are computed, for the report
    gpu: str = ""  # the GPU's identifier, as its driver knows it; empty without one
    capture_s: float | None = None  # capturing graphs, once the weights were loaded; None on a CPU
    graph_bytes: int | None = None  # of the GPU's memory, that these graphs took; None on a CPU
    free_bytes: int | None = None  # of the GPU's memory, left once the engine is ready; None on a CPU
    division: Division = UNDIVIDED  # of its ranks; what is counted in bytes is one rank's


# Part of every work key. Raise it when a change of operators may change a token, so that answers stored by the old
# arithmetic are not reused.
NUMERICS_VERSION = 6


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """An order for an int4 checkpoint in the empty `folder`, with groups of `group` inputs, of the
    model that `load` names. `prompts`: in the order in which they were drawn; `answer_tokens`: the most of an answer
    to each, 0 where the job's rows have no answers that are texts. `adapted`: whether adapters of the model are to
    fit the checkpoint, too."""

    load: LoadConfig
    prompts: tuple[TokenIds, ...]
    answer_tokens: int
    folder: Path
    group: int
    adapted: bool = False
