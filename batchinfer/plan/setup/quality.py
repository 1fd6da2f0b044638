"""The measured quality of a job's quantised weights: which jobs are measured, their record, warnings and limits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from batchinfer.core.errors import QualityTooLow
from batchinfer.core.statistics.quality import Quality
from batchinfer.filesystem.durable import write_json
from batchinfer.filesystem.json_files import read_json, read_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.weights import has_own_caches, loss_of

# A run warns beyond these values. bfloat16 itself has a KL of 0.0012 nats and 97.4 % from float32 on SmolLM2-135M
# (docs/measurements/quantisation.md)
KL_WARNING, TOP1_WARNING, COSINE_WARNING = 0.02, 0.95, 0.99


def quantises(setup: Setup) -> bool:
    """Return True if the job's model computes with quantised weights or a quantised KV cache."""
    numerics = setup.setting.numerics
    return numerics.quantization != "none" or numerics.kv_cache != "auto"


def why_not_measured(setup: Setup) -> str | None:
    """Return the reason why the quality of a quantised model cannot be measured, or None if it can."""
    checkpoint = setup.checkpoint
    if not isinstance(checkpoint, Checkpoint):
        return "transformers' code computes the model"
    if not has_own_caches(checkpoint.spec):
        return "layers of the model read keys and values of other layers"
    return None


def quality_key(job: Job, setup: Setup, digests: dict[str, str]) -> str:
    """Return the key of a job's measurement: a digest of its weights, quantisation and prompt.

    Args:
        job: The job.
        setup: Its setup.
        digests: Digests of weight files by path; unknown ones are computed and added.
    """
    numerics = setup.setting.numerics
    parts = (
        numerics.version,
        setup.checkpoint.fingerprint(digests),
        numerics.device,
        numerics.dtype,
        numerics.quantization,
        numerics.kv_cache,
        sorted(setup.adapters.values()),
        job.task,
        repr(job.prompt),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def stored_quality(job: Job, setup: Setup, state: StateFolder) -> Quality | None:
    """Return the last measurement of a job's quantised weights, or None if there is none.

    The calibration of int4 weights measures their quality, too.
    """
    if setup.setting.parts.weights is not None:
        return loss_of(setup.setting.parts.weights)
    records = read_json(state.quality)
    if not quantises(setup) or not isinstance(records, dict):
        return None
    record = records.get(quality_key(job, setup, read_strings(state.fingerprints)))
    fields = Quality.__dataclass_fields__.keys()
    return Quality(**record) if isinstance(record, dict) and record.keys() == fields else None


def store_quality(job: Job, setup: Setup, state: StateFolder, quality: Quality) -> None:
    """Add a measurement to the record in the state folder. Raises StorageError."""
    with state.lock_shared():
        records = read_json(state.quality)
        records = records if isinstance(records, dict) else {}
        records[quality_key(job, setup, read_strings(state.fingerprints))] = asdict(quality)
        write_json(state.quality, records, state.ops)


def quality_line(setup: Setup, quality: Quality) -> str:
    """Return a line for the user about a measurement. It warns if quantisation changes many answers."""
    text = setup.setting.numerics.text
    if (
        _is_above(quality.kl, KL_WARNING)
        or _is_below(quality.top1, TOP1_WARNING)
        or _is_below(quality.cosine, COSINE_WARNING)
    ):
        return (
            f"{text} changes many answers of this job: {quality}; "
            "set model.quantization: none if quality matters more than speed"
        )
    return f"quality of {text}: {quality}"


def _is_above(value: float | None, limit: float | None) -> bool:
    # A value that is not a number is beyond every limit
    return value is not None and limit is not None and not value <= limit


def _is_below(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and not value >= limit


def check_quality_limits(job: Job, quality: Quality) -> None:
    """Raise QualityTooLow if a measurement is beyond the job's `engine.quality_limits`."""
    limits = job.engine.quality_limits
    if limits is None:
        return
    beyond = []
    if _is_above(quality.kl, limits.kl):
        beyond.append(f"KL {quality.kl:.4f} nats is above engine.quality_limits.kl: {limits.kl:g}")
    if _is_below(quality.top1, limits.top1):
        beyond.append(
            f"top-1 agreement {quality.top1:.4f} is below engine.quality_limits.top1: {limits.top1:g}"
        )
    if _is_below(quality.cosine, limits.cosine):
        beyond.append(f"cosine {quality.cosine:.4f} is below engine.quality_limits.cosine: {limits.cosine:g}")
    if beyond:
        raise QualityTooLow(
            f"{'; '.join(beyond)}. No answer was computed. Use another model.quantization, or change the limits"
        )
