"""Checks a job against its device, memory and checkpoint before the model loads."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.core.errors import CannotSplit, JobFileError, Mistake, Unavailable
from batchinfer.core.wording import size
from batchinfer.engine.ranks.shards import check_division
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.setup.placement import division_of
from batchinfer.plan.setup.setting import PlacedModel, Setting, engine_weights
from batchinfer_kernels.arithmetic import Device, Dtype, Quantization

_WITH_HEAD = "…ForSequenceClassification"


def check_device(job: Job, machine: MachineFacts) -> None:
    """Raise Unavailable if the job requires a GPU, and torch has no CUDA or the machine has no NVIDIA GPU."""
    if job.engine.device != "cuda":
        return
    if machine.torch_has_cuda is False:
        raise Unavailable(
            "engine.device is cuda, and the torch that is installed computes on CPUs only; "
            "use device: cpu, or install torch with CUDA"
        )
    if machine.has_gpu is False:
        raise Unavailable(
            "engine.device is cuda, and this machine has no NVIDIA GPU; use device: cpu, or auto"
        )


def check_kv_memory(job: Job, models: list[PlacedModel]) -> None:
    """Check that `engine.kv_memory` and the weights of the models fit into the memory of the device.

    Nothing is checked if `engine.kv_memory` is not a number of bytes, or if the device's memory is unknown.

    Args:
        job: The job.
        models: The job's model, and a draft model that runs in the same engines, if any.

    Raises:
        JobFileError: They do not fit.
    """
    asked, setting = job.engine.kv_memory, models[0].setting
    total = setting.placement.hardware.memory_bytes
    if not isinstance(asked, int) or total is None:
        return
    weights = _weights(models)
    room = max(0, total - weights)
    if asked > room:
        raise job.mistake(
            "engine.kv_memory",
            f"{size(asked)} is more than {_place(setting)} has: {size(total)} of memory, and the weights take "
            f"{size(weights)} of it; use at most {room >> 20}MiB, or auto",
        )


def kv_memory_warnings(job: Job, models: list[PlacedModel]) -> list[str]:
    """Return a warning if the weights and `engine.kv_memory` together need more memory than is free now.

    The result has one warning or none. It is empty on GPUs, whose free memory is unknown here.

    Args:
        job: The job.
        models: The job's model, and a draft model that runs in the same engines, if any.
    """
    asked, machine = job.engine.kv_memory, models[0].setting.placement.machine
    free = machine.free_memory
    if not isinstance(asked, int) or machine.device == "cuda" or free is None:
        return []
    weights = _weights(models)
    if asked <= free - weights:
        return []
    return [
        f"engine.kv_memory: {size(asked)} and {size(weights)} of weights are more than the {size(free)} "
        "of memory that are free now; end other programs, or lower it"
    ]


def _weights(models: list[PlacedModel]) -> int:
    placement, whole = models[0].setting.placement, engine_weights(models)
    if placement.machine.device == "cuda":
        return whole // placement.division.ranks
    return whole * placement.processes_here // placement.division.ranks


def _place(setting: Setting) -> str:
    return f"a {setting.placement.hardware.name}" if setting.device == "cuda" else "this machine"


def check_model(job: Job, checkpoint: StoredModel, device: Device, dtype: Dtype) -> None:
    """Check that the checkpoint and the device support all options of the job.

    Args:
        job: The job.
        checkpoint: The job's model.
        device: Device of the engines: "cpu" or "cuda".
        dtype: Data type of the model's activations.

    Raises:
        JobFileError: An option is unsupported.
    """
    if mistakes := list(_mistakes(job, checkpoint, device, dtype)):
        raise JobFileError(str(job.source), mistakes)


def _mistakes(job: Job, checkpoint: StoredModel, device: Device, dtype: Dtype) -> Iterator[Mistake]:
    yield from _wrong_for_encoders(job, checkpoint)
    asked, length = job.model.quantization, job.model.max_model_len
    positions, cpu = checkpoint.spec.max_positions, device == "cpu"
    if length is not None and length > positions:
        text = (
            f"{length} is more than the {positions} positions that the checkpoint was made for; leave it out"
        )
        yield Mistake("model.max_model_len", text)
    if cpu and job.model.kv_cache_dtype == "fp8":
        text = "only a GPU can read and write it, and device: auto means the CPU here; use int8"
        yield Mistake("model.kv_cache_dtype", f"fp8: {text}")
    fp8 = cpu and (asked == "fp8" or (asked == "stored" and checkpoint.stored_quantization == "stored"))
    if fp8:
        text = "only a GPU can multiply in fp8, and device: auto means the CPU here; use int8"
        yield Mistake("model.quantization", f"{asked}: {text}")
    if cpu and dtype == "float16":
        text = (
            "not available in float16 on a CPU, which device: auto means here; use dtype: bfloat16 or float32"
        )
        if job.model.kv_cache_dtype == "int8":
            yield Mistake("model.kv_cache_dtype", f"int8 is {text}, or leave it out")
        if asked not in ("auto", "none") and not fp8:
            yield Mistake("model.quantization", f"{asked} is {text}, or leave it out")
        if job.engine.deterministic:
            yield Mistake("engine.deterministic", f"true is {text}, or leave it out")
    sparse = asked == "stored" and checkpoint.stored_quantization == "stored-sparse"
    if sparse and (cpu or dtype == "float32" or job.engine.deterministic):
        text = (
            "only a GPU can leave out the zeros of 2:4 sparse weights, in bfloat16 and float16, and not with "
            "engine.deterministic; leave it out"
        )
        yield Mistake("model.quantization", f"stored: {text}")
    if asked == "stored" and checkpoint.stored_quantization == "none":
        text = "the checkpoint stores no weights that can be multiplied as they are (docs/models.md); leave it out"
        yield Mistake("model.quantization", f"stored: {text}")
    quantized, coded_cache = asked not in ("auto", "none"), job.model.kv_cache_dtype != "auto"
    refused = checkpoint.refusals(quantized, job.engine.deterministic, coded_cache)
    yield from (Mistake(key, text) for key, text in refused)


def _wrong_for_encoders(job: Job, checkpoint: StoredModel) -> Iterator[Mistake]:
    if not isinstance(checkpoint, Checkpoint) or checkpoint.spec.causal:
        if job.rerank.document is not None:
            text = "is for cross-encoders, and the checkpoint is a decoder, whose prompts hold query and document"
            yield Mistake("rerank.document", f"{text}; put it in prompt.user")
        return
    spec = checkpoint.spec
    if job.task == "rerank":
        yield from _pair_mistakes(job, spec)
    elif job.task != "embed":
        text = f"the checkpoint is an encoder (model_type {spec.family}), which generates no texts"
        yield Mistake("task", f"{job.task}: {text}; use task: embed, or another model")


def _pair_mistakes(job: Job, spec: ModelSpec) -> Iterator[Mistake]:
    what, head = f"the checkpoint is an encoder (model_type {spec.family})", spec.classifier
    if head is None:
        text = f"{what} without a classification head, and a cross-encoder has one ({_WITH_HEAD})"
        yield Mistake("task", f"rerank: {text}; use another model")
    elif head.labels != 1:
        text = f"{what} whose head has {head.labels} labels, and a reranker has one, the score"
        yield Mistake("task", f"rerank: {text}; use another model")
    elif job.rerank.document is None:
        text = f"{what}, which compares the prompt with a document: name the document's column"
        yield Mistake("rerank.document", f"is missing: {text}, and give the query alone in prompt")


def check_division_of(job: Job, checkpoint: StoredModel, device: Device, quantization: Quantization) -> None:
    """Check that the job's model can be sharded as the job file says. Does nothing for a single rank.

    Args:
        job: The job.
        checkpoint: The job's model.
        device: Device of the engines.
        quantization: Quantisation of the weights in the engines.

    Raises:
        Unavailable: The model cannot be sharded, or `engine.deterministic` is incompatible with tensor parallelism.
    """
    division = division_of(job)
    if division.ranks > 1 and not isinstance(checkpoint, Checkpoint):
        raise CannotSplit("a model that transformers' code computes cannot be sharded among ranks")
    if division.ranks > 1 and isinstance(checkpoint, Checkpoint):
        check_division(
            checkpoint.spec.quantized(quantization).with_cache_dtype(job.model.kv_cache_dtype), division
        )
    if job.engine.deterministic and job.engine.tensor_parallel_size > 1:
        raise Unavailable(
            "engine.deterministic promises the bits of one process, and ranks that compute each layer together "
            "(engine.tensor_parallel_size) add up in another order; engine.pipeline_parallel_size and "
            "engine.expert_parallel_size keep the bits"
        )
