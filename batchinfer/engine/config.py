"""The settings of an engine: plain values that can be sent to the engine's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.request import TokenIds
from batchinfer.core.samples import DraftSourceName
from batchinfer.core.sampling import Pooling
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
    """Call `choose` and return its result.

    An engine that need not agree with other engines gets this function as `agreed`. Other engines get a function that
    calls `choose` in one engine and returns the result in all of them.

    Args:
        choose: Makes a choice and returns it as JSON.
    """
    return choose()


def max_queued_requests(max_num_seqs: int) -> int:
    """Return the number of unfinished requests that the driver should keep in an engine.

    With this number, the engine never waits for requests: 3 per running sequence, at least 512.

    Args:
        max_num_seqs: The maximum number of sequences that the engine runs at once.
    """
    return max(REQUEST_BATCH, _QUEUED * max_num_seqs)


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """The settings for loading a draft model.

    Attributes:
        model: The folder of the checkpoint.
        dtype: The dtype of weights and activations.
        quantization: How the weights are quantised.
        kv_cache: The dtype of cached keys and values.
    """

    model: Path
    dtype: Dtype
    quantization: Quantization = "none"
    kv_cache: KvCacheDtype = "auto"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """The settings for loading the weights, which are known before the first row is read.

    Attributes:
        model: The folder of the checkpoint.
        dtype: The dtype of weights and activations.
        device: The kind of device: CPU or GPU.
        threads: The number of CPU threads, or None for one per usable core.
        quantization: How the weights are quantised.
        deterministic: True if the result of a row must not depend on the other rows of a batch.
        tiles: True if a deterministic run on a CPU must give the same bits as a CPU with matrix tiles (AMX).
        kv_cache: The dtype of cached keys and values.
        adapters: The fingerprint and the folder of each LoRA adapter.
        adapter_slots: Maximum number of LoRA adapters on the device at a time, or None for all.
        draft_model: The settings of the draft model, or None if the job has none.
        heads: The folder of draft heads, or None if the job has none.
        experts: The experts (of mixture-of-experts layers) that each rank holds. None: each rank holds an equal range
            of consecutive experts.
    """

    model: Path
    dtype: Dtype
    device: Device
    threads: int | None = None
    quantization: Quantization = "none"
    deterministic: bool = False
    tiles: bool = False
    kv_cache: KvCacheDtype = "auto"
    adapters: tuple[tuple[str, Path], ...] = ()
    adapter_slots: int | None = None
    draft_model: DraftModelConfig | None = None
    heads: Path | None = None
    experts: ExpertPlacement | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. Some are known only after planning.

    Attributes:
        load: The settings for loading the weights.
        max_model_len: Maximum number of tokens of a sequence, prompt and output.
        longest: The number of tokens, prompt and output, of the longest sequence in the job.
        max_num_seqs: Maximum number of running sequences. None: the engine chooses.
        max_num_batched_tokens: Maximum number of tokens per step. None: the engine chooses.
        block_size: The number of tokens per KV cache block. None: the engine chooses.
        kv_memory: The size of the KV cache: an int in bytes, or a float as a share of the memory that is free after
            loading the weights. None: the engine chooses.
        prefix_caching: True if sequences may share the cached blocks of a common prefix.
        memory: The bytes of host memory that a CPU engine may use, weights included. None: all free memory.
        peaks: The peak FLOP/s and bandwidth of this engine's share of the device, or None if unknown.
        logprobs: The highest number of log-probabilities per token that a row requests. None: no row requests any.
        drafts: The names of the draft sources.
    """

    load: LoadConfig
    max_model_len: int
    longest: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_memory: int | float | None = None
    prefix_caching: bool = True
    memory: int | None = None
    peaks: Peaks | None = None
    logprobs: int | None = None
    drafts: tuple[DraftSourceName, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The properties of a loaded engine.

    The report shows them. The driver derives from them how many requests it sends to the engine. Numbers of bytes are
    per rank if the model is sharded.

    Attributes:
        ops: The name of the operator implementation.
        device: The name of the device.
        dtype: The dtype of weights and activations.
        threads: The number of CPU threads.
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum number of tokens per step.
        block_size: The number of tokens per KV cache block.
        blocks: The number of blocks of the KV cache.
        kv_bytes: The size of the KV cache in bytes.
        weight_bytes: The size of the weights in bytes.
        quantization: How the weights are quantised.
        deterministic: True if the result of a row does not depend on the other rows of a batch.
        linear: How the linear layers are computed.
        gpu: The GPU's UUID; empty on a CPU.
        capture_s: The seconds spent capturing CUDA graphs; None on a CPU.
        graph_bytes: The device memory of the CUDA graphs in bytes; None on a CPU.
        free_bytes: The free device memory when the engine is ready, in bytes; None on a CPU.
        division: How the model is sharded over ranks.
    """

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
    linear: str = ""
    gpu: str = ""
    capture_s: float | None = None
    graph_bytes: int | None = None
    free_bytes: int | None = None
    division: Division = UNDIVIDED


# Part of every work key. Raise it when a change of operators may change a token: stored answers are then not reused.
NUMERICS_VERSION = 6


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """The input of an int4 calibration, which quantises a model with the help of sample prompts.

    Attributes:
        load: The settings for loading the unquantised model.
        prompts: Sample prompts, in the order in which they were drawn.
        answer_tokens: Maximum number of tokens to generate per prompt, or 0 if the job generates no text.
        folder: The output folder, which must be empty.
        group: The number of inputs of a weight matrix that share a scale.
        adapted: True if the quantised checkpoint must stay compatible with the model's LoRA adapters.
    """

    load: LoadConfig
    prompts: tuple[TokenIds, ...]
    answer_tokens: int
    folder: Path
    group: int
    adapted: bool = False


@dataclass(frozen=True, slots=True)
class QualityOrder:
    """The input of a measurement of how much quantisation changes a model's predictions.

    Attributes:
        load: The settings for loading the quantised model.
        prompts: Prompts of the job, at least one.
        pooling: The pooling of hidden states, for a model that computes vectors. None: the model predicts tokens.
    """

    load: LoadConfig
    prompts: tuple[TokenIds, ...]
    pooling: Pooling | None = None
