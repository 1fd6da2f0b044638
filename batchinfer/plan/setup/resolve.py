"""Resolves every `auto` of a job for a machine: dtype, quantisation, lengths and placement."""

from __future__ import annotations

from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.checks import check_division_of, check_model
from batchinfer.plan.setup.numerics import Numerics
from batchinfer.plan.setup.placement import placement_of
from batchinfer.plan.setup.setting import Setting
from batchinfer_kernels.arithmetic import Dtype, Quantization, RequestedQuantization


def resolve(job: Job, checkpoint: StoredModel, machine: MachineFacts) -> Setting:
    """Replace every `auto` of a job by a value for the machine: data type, quantisation, lengths and placement.

    Args:
        job: The job.
        checkpoint: The job's model.
        machine: The machine of the engines.

    Raises:
        JobFileError: The model has fewer positions than max_model_len, the device does not support the job, or the
            machine has too few cores or GPUs.
        Unavailable: The model cannot be sharded as the job file says, or not with `engine.deterministic`.
    """
    dtype = job.model.dtype if job.model.dtype != "auto" else auto_dtype(machine, checkpoint.dtype)
    check_model(job, checkpoint, machine.device, dtype)
    quantization = resolved_quantization(job.model.quantization, checkpoint, machine, dtype)
    if quantization == "stored-sparse" and job.engine.deterministic:
        quantization = "none"  # cuSPARSELt is not deterministic
    check_division_of(job, checkpoint, machine.device, quantization)
    numerics = Numerics(
        device=machine.device,
        dtype=dtype,
        max_model_len=job.model.max_model_len or checkpoint.spec.max_positions,
        quantization=quantization,
        deterministic=job.engine.deterministic,
        block_size=job.engine.block_size,
        tiles=machine.tiles,
        arm=machine.arm_sums(dtype),
        kv_cache=job.model.kv_cache_dtype,
    )
    return Setting(numerics, placement_of(job, machine))


def auto_dtype(machine: MachineFacts, stored: Dtype) -> Dtype:
    """Return the data type for `model.dtype: auto`: `stored`, or float32 on a CPU without fast bfloat16.

    Args:
        machine: The machine of the engines.
        stored: The data type of the checkpoint's weights.
    """
    if machine.device == "cuda" or stored == "float32":
        return stored
    return "bfloat16" if machine.fast_bf16 else "float32"


def resolved_quantization(
    asked: RequestedQuantization, checkpoint: StoredModel, machine: MachineFacts, dtype: Dtype
) -> Quantization:
    """Return the quantisation that the weights have in the engines.

    With `auto`, weights that the checkpoint stores quantised stay so if the device can multiply them. Otherwise, and
    always for int4, they are dequantised when they are loaded.

    Args:
        asked: `model.quantization` of the job file.
        checkpoint: The job's model.
        machine: The machine of the engines.
        dtype: The data type of the products.
    """
    stored, on_gpu = checkpoint.stored_quantization, machine.device == "cuda"
    if asked == "stored":
        return stored
    if asked != "auto":
        return asked
    if stored == "stored-int4":
        return "none"
    if stored == "stored-sparse":
        return stored if on_gpu and dtype != "float32" else "none"
    if stored in ("stored-int8", "stored-mxfp4"):
        return stored if on_gpu or dtype != "float16" else "none"
    return stored if machine.multiplies_fp8 else "none"
