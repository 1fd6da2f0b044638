"""Chooses the weights of a job: its adapters, and int4 weights that an earlier run has calibrated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import CannotSplit
from batchinfer.core.statistics.quality import Quality
from batchinfer.engine.ranks.shards import check_stored
from batchinfer.filesystem.json_files import read_json, read_strings, write_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.models.adapters.sizes import AdapterSizes, adapter_sizes
from batchinfer.models.adapters.stored_adapter import DORA_NOT_SHARDED, StoredAdapter, inspect_adapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.spec import AttentionSpec, ExpertsSpec, ModelSpec
from batchinfer.plan.setup.setting import Setting

# Raise it when calibration makes different weights, so jobs use new ones. Answers from the old weights are lost.
CALIBRATION_VERSION = 1
EXPERTS_VERSION = " experts"  # version of the calibration of experts
RECORD = "calibration.json"  # next to the weights: the measured loss
ROWS_READ = 512  # rows that are read; those within MOST_TOKENS are used
# A third is held out, and answers are added. On the quickstart's model, 20 rows with 3,400 tokens had up to 3 times the
# divergence of 50 rows with 8,600. 200 rows had no less (docs/measurements/quantisation.md).
MOST_TOKENS = 8_192
LONGEST = 2_048  # tokens of a prompt; the rest is truncated
ANSWER_TOKENS = 64  # answer tokens per prompt, which are part of the sample
_DIGITS = 24  # hex digits of a folder's name


@dataclass(frozen=True, slots=True)
class JobWeights:
    """A job's model and setting, after adapters and calibrated weights were chosen.

    Attributes:
        checkpoint: The model, with calibrated weights if there are any.
        setting: The setting, with adapters and calibrated weights.
        adapters: Fingerprints of the job's adapters, by name.
    """

    checkpoint: StoredModel
    setting: Setting
    adapters: dict[str, str]


def job_weights(job: Job, checkpoint: StoredModel, setting: Setting, state: StateFolder) -> JobWeights:
    """Choose the weights of a job: its adapters, and calibrated int4 weights if an earlier run has stored them.

    Args:
        job: The job.
        checkpoint: The job's model.
        setting: The resolved setting of the job.
        state: The job's state folder.

    Raises:
        JobFileError: An adapter is unsupported, or the zero points of quantised weights cannot be stored.
        SecurityRefusal: An adapter is not safe to load.
        CannotSplit: The checkpoint or an adapter cannot be sharded among the job's ranks.
    """
    checkpoint.check_zero_points(read_strings(state.fingerprints))
    held = checkpoint.for_quantization(setting.numerics.quantization)
    adapters = job_adapters(job, held, state)
    setting = with_adapters(setting, job, adapters)
    found, setting = with_calibration(job, held, setting, state, adapters.merged)
    division = setting.placement.division
    if division.ranks > 1 and isinstance(found, Checkpoint):
        check_stored(found, division)
        if adapters.merged and division.tensor > 1:
            raise CannotSplit(DORA_NOT_SHARDED)
    return JobWeights(found, setting, adapters.fingerprints)


@dataclass(frozen=True, slots=True)
class JobAdapters:
    """The adapters of a job.

    Attributes:
        fingerprints: Fingerprints of the adapters, by name.
        sizes: Sizes of adapters that are not merged into the weights. None without such adapters.
        merged: Whether the only adapter is merged into the weights.
    """

    fingerprints: dict[str, str]
    sizes: AdapterSizes | None = None
    merged: bool = False


def job_adapters(job: Job, checkpoint: StoredModel, state: StateFolder) -> JobAdapters:
    """Check and return the job's adapters. Files with unknown digests are hashed.

    Args:
        job: The job.
        checkpoint: The job's model.
        state: The job's state folder, which stores known digests.

    Raises:
        JobFileError: An adapter is unsupported.
        SecurityRefusal: An adapter is not safe to load.
    """
    if not job.model.adapters:
        return JobAdapters({})
    if not isinstance(checkpoint, Checkpoint):
        text = f"{checkpoint.spec.family} is computed by transformers' code, which is given no adapters"
        raise job.mistake("model.adapters", f"{text}; merge them into the model (PEFT: merge_and_unload)")
    known = read_strings(state.fingerprints)
    found = {name: inspect_adapter(name, path, checkpoint) for name, path in job.model.adapters.items()}
    _check_merged(job, found)
    fingerprints = {name: adapter.fingerprint(known) for name, adapter in found.items()}
    different = {fingerprints[name]: adapter for name, adapter in found.items()}
    merged = any(adapter.config.dora for adapter in found.values())
    return JobAdapters(fingerprints, adapter_sizes(checkpoint.spec, [*different.values()]), merged)


def _check_merged(job: Job, found: Mapping[str, StoredAdapter]) -> None:
    dora = next((name for name, adapter in found.items() if adapter.config.dora), None)
    if dora is None or (len(found) == 1 and job.model.adapter == dora):
        return
    text = (
        "is a DoRA, which rescales the rows of the model's weights, and is merged into them: it must be the only "
        f"adapter, and that of all rows; set model.adapter: {dora}, or merge it with PEFT (merge_and_unload)"
    )
    raise job.mistake(f"model.adapters.{dora}", text)


def with_adapters(setting: Setting, job: Job, adapters: JobAdapters) -> Setting:
    """Return the setting with the folders and sizes of the job's adapters.

    Adapters with equal files are loaded once.
    """
    folders = {adapters.fingerprints[name]: path for name, path in reversed(job.model.adapters.items())}
    if not folders:
        return setting
    return setting.with_parts(adapters=tuple(folders.items()), adapter_sizes=adapters.sizes)


def can_calibrate(checkpoint: StoredModel) -> bool:
    """Return True if int4 weights can be calibrated for the model.

    The model must be a native decoder with weights stored in floats, and no layer may read keys and values of another
    layer.
    """
    if not isinstance(checkpoint, Checkpoint):
        return False
    return checkpoint.plain and checkpoint.spec.causal and has_own_caches(checkpoint.spec)


def has_own_caches(spec: ModelSpec) -> bool:
    """Return True if each layer attends to its own keys and values."""
    attentions = (layer.attention for layer in spec.layers)
    return not any(
        isinstance(attention, AttentionSpec) and attention.kv_layer is not None for attention in attentions
    )


def with_calibration(
    job: Job, checkpoint: StoredModel, setting: Setting, state: StateFolder, merged: bool = False
) -> tuple[StoredModel, Setting]:
    """Return the model and setting with calibrated weights, if the job uses them and the state folder has them.

    Otherwise the model is returned unchanged. The setting says whether the job calibrates.

    Args:
        job: The job.
        checkpoint: The job's model.
        setting: The setting of the job.
        state: The job's state folder, in which an earlier run may have stored calibrated weights.
        merged: Whether an adapter is merged into the weights while they are loaded. Such a job needs float weights
            and is not calibrated.
    """
    asked = (setting.numerics.quantization, job.model.calibration) == ("int4", "auto")
    if not asked or merged or not can_calibrate(checkpoint):
        return checkpoint, setting
    setting = setting.with_numerics(calibrates=True)
    any_there, adapted = any(state.int4.glob(f"*/{RECORD}")), bool(job.model.adapters)
    found = calibrated_folder(checkpoint, state, adapted) if any_there else None
    if not found or not (found / RECORD).exists():
        return checkpoint, setting
    return inspect_checkpoint(found).for_quantization("int4"), setting.with_parts(weights=found)


def calibrated_folder(
    checkpoint: StoredModel, state: StateFolder, adapted: bool, remember: bool = False
) -> Path:
    """Return the folder of the model's calibrated weights, whether it exists or not.

    Args:
        checkpoint: The job's model.
        state: The job's state folder.
        adapted: Whether the job has adapters. The folder then also has the data that adapters need.
        remember: Whether to store new digests of weight files in the state folder.
    """
    digests = read_strings(state.fingerprints)
    before = dict(digests)
    model = checkpoint.fingerprint(digests)
    if remember and digests != before:
        with state.lock_shared():
            write_strings(state.fingerprints, digests, state.ops)
    version = f"{CALIBRATION_VERSION}{' adapted' if adapted else ''}{_experts_version(checkpoint)}"
    digest = hashlib.sha256(f"{model} {version}".encode()).hexdigest()
    return state.int4 / digest[:_DIGITS]


def _experts_version(checkpoint: StoredModel) -> str:
    layers = checkpoint.spec.layers if isinstance(checkpoint, Checkpoint) else ()
    return EXPERTS_VERSION if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in layers) else ""


def record_of(loss: Quality | None) -> dict[str, object]:
    """Return the quality of calibrated weights as the JSON object that is stored next to them."""
    found = None if loss is None else {"kl": loss.kl, "same": loss.top1, "tokens": loss.positions}
    return {"version": CALIBRATION_VERSION, "loss": found}


def loss_of(folder: Path) -> Quality | None:
    """Return the quality of calibrated weights that was stored in their folder, or None if there is none."""
    record = read_json(folder / RECORD)
    loss = record.get("loss") if isinstance(record, dict) else None
    if not isinstance(loss, dict) or loss.keys() != {"kl", "same", "tokens"}:
        return None
    return Quality(loss["kl"], loss["same"], loss["tokens"])
