"""The settings of an engine: plain values that can be sent to the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import DraftName
from batchinfer.engine.ranks.division import UNDIVIDED, Division
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer_kernels.arithmetic import Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import Peaks

# Rows that run at once. A CPU becomes compute-bound at fewer rows than a GPU (docs/measurements/scheduling.md)
DEFAULT_MAX_NUM_SEQS = {"cpu": 256, "cuda": 1024}
DEFAULT_BLOCK_SIZE = 16
REQUEST_BATCH = 512  # requests that are sent to an engine at once
_QUEUED = 3  # unfinished requests per row of max_num_seqs: enough that the engine never waits for requests

# A context for work of unknown duration: the watchdog of the engine does not take it for a hang
Untimed = Callable[[], AbstractContextManager[object]]

# Makes a choice that all engines of a run share: calls the function in one engine and returns its result in all
Agreed = Callable[[Callable[[], str]], str]
NO_CHOICE = "{}"  # the result if the engine died while choosing


def choose_alone(choose: Callable[[], str]) -> str:
    """Call `choose`: the choice function of an engine that shares its choices with no other."""
    return choose()


def max_queued_requests(max_num_seqs: int) -> int:
    """Return the number of unfinished requests to keep in an engine."""
    return max(REQUEST_BATCH, _QUEUED * max_num_seqs)


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """The settings for loading a draft model."""

    model: Path
    dtype: Dtype
    quantization: Quantization = "none"
    kv_cache: KvCacheDtype = "auto"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The settings for loading the weights, which are known before the first row is read."""

    model: Path
    dtype: Dtype
    device: Device
    threads: int | None = None  # None: one per usable core
    quantization: Quantization = "none"
    deterministic: bool = False  # the result of a row does not depend on the other rows
    tiles: bool = False  # a deterministic run on a CPU computes the bits of matrix tiles (AMX)
    kv_cache: KvCacheDtype = "auto"
    adapters: tuple[tuple[str, Path], ...] = ()  # fingerprints and folders
    adapter_slots: int | None = None  # adapters on the device at a time; None: all
    draft_model: DraftModelConfig | None = None
    heads: Path | None = None  # the folder of draft heads
    experts: ExpertPlacement | None = None  # which experts each rank holds; None: contiguous ranges


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. Some are known only after planning. None: the engine chooses the value."""

    load: LoadConfig
    max_model_len: int
    longest: int  # tokens (prompt and output) of the job's longest sequence
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    # Bytes, or a share of the memory that is free after loading the weights
    kv_memory: int | float | None = None
    prefix_caching: bool = True
    # Bytes of host memory for a CPU engine, weights included; None: all free memory
    memory: int | None = None
    peaks: Peaks | None = None  # peak speeds of this engine's share of the device
    logprobs: int | None = None  # the most log-probabilities per token that a row requests; None: no row does
    drafts: tuple[DraftName, ...] = ()  # draft sources


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of a running engine, for the report and for the feeder that keeps its queue filled."""

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
    gpu: str = ""  # the GPU's UUID; empty on a CPU
    capture_s: float | None = None  # seconds spent capturing graphs; None on a CPU
    graph_bytes: int | None = None  # device memory of these graphs; None on a CPU
    free_bytes: int | None = None  # free device memory when the engine is ready; None on a CPU
    division: Division = UNDIVIDED  # its ranks; all bytes above are of one rank


# Part of every work key. Raise it when a change of operators may change a token: stored answers are then not reused.
NUMERICS_VERSION = 6


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """The input of an int4 calibration."""

    load: LoadConfig  # the model
    prompts: tuple[TokenIds, ...]  # sample prompts, in the order in which they were drawn
    answer_tokens: int  # maximum tokens per answer; 0: the job generates no text
    folder: Path  # the output folder, empty
    group: int  # inputs per quantisation group
    adapted: bool = False  # keep the checkpoint compatible with the model's adapters
