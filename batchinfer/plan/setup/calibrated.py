"""The weights of a job in int4 that an earlier run of it has calibrated: which jobs have such, and where they lie."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from batchinfer.data.storage.remembered import read_json, read_strings, write_strings
from batchinfer.data.storage.state import StateFolder
from batchinfer.job import Job
from batchinfer.models.calibration.loss import Loss
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.spec.spec import AttentionSpec, ExpertsSpec, ModelSpec
from batchinfer.plan.setup.resolve import Setting

# Raise it when a calibration comes to make other weights, so that jobs get these. Their stored answers are lost then.
CALIBRATION_VERSION = 1
EXPERTS_VERSION = " experts"  # the same of models with experts alone
RECORD = "calibration.json"  # beside the weights: what they lost
ROWS_READ = 512  # of the job, of which as many become prompts as have room
# A third of them is held out, and answers are added. On the quickstart's model 20 rows with 3,400 tokens gave up to
# three times the divergence that 50 rows with 8,600 gave, and 200 rows no less than these (docs/performance.md)
MOST_TOKENS = 8_192
LONGEST = 2_048  # tokens of a prompt, whose rest is cut off
ANSWER_TOKENS = 64  # of the answer to a prompt, which the weights are made for, too
_DIGITS = 24  # of the digest that names a folder


def can_calibrate(checkpoint: StoredModel) -> bool:
    """Whether weights of the checkpoint can be calibrated: those of a decoder of ours, stored in floats, whose layers
    read no other layer's K and V."""
    return isinstance(checkpoint, Checkpoint) and checkpoint.plain and _is_plain(checkpoint.spec)


def _is_plain(spec: ModelSpec) -> bool:
    attentions = (layer.attention for layer in spec.layers)
    return spec.causal and not any(
        isinstance(attention, AttentionSpec) and attention.kv_layer is not None for attention in attentions
    )


def with_calibration(
    job: Job, checkpoint: StoredModel, setting: Setting, state: StateFolder, merged: bool = False
) -> tuple[StoredModel, Setting]:
    """Return the model and the setting with the calibrated weights, if the job is to have such: without them, if no run
    has made them yet. `merged`: an adapter is merged into the weights as they are loaded, which have to be floats."""
    asked = (setting.quantization, job.model.calibration) == ("int4", "auto")
    if not asked or merged or not can_calibrate(checkpoint):
        return checkpoint, setting
    setting = replace(setting, calibrates=True)
    any_there, adapted = any(state.int4.glob(f"*/{RECORD}")), bool(job.model.adapters)
    found = calibrated_folder(checkpoint, state, adapted) if any_there else None
    if not found or not (found / RECORD).exists():
        return checkpoint, setting
    return inspect_checkpoint(found).held_for("int4"), replace(setting, weights=found)


def calibrated_folder(
    checkpoint: StoredModel, state: StateFolder, adapted: bool, remember: bool = False
) -> Path:
    """Return where the calibrated weights of this model lie, or are to lie: those that `adapted` jobs have, too, say
    what their adapters need to know. `remember`: the state is to know the digests of weight files that it did not."""
    digests = read_strings(state.fingerprints)
    before = dict(digests)
    model = checkpoint.fingerprint(digests)
    if remember and digests != before:
        with state.exclusively():
            write_strings(state.fingerprints, digests, state.ops)
    version = f"{CALIBRATION_VERSION}{' adapted' if adapted else ''}{_experts_version(checkpoint)}"
    digest = hashlib.sha256(f"{model} {version}".encode()).hexdigest()
    return state.int4 / digest[:_DIGITS]


def _experts_version(checkpoint: StoredModel) -> str:
    """Return what tells weights with experts from those that were made before experts were calibrated."""
    layers = checkpoint.spec.layers if isinstance(checkpoint, Checkpoint) else ()
    return EXPERTS_VERSION if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in layers) else ""


def record_of(loss: Loss | None) -> dict[str, object]:
    """Return what is kept beside the weights, as JSON."""
    return {"version": CALIBRATION_VERSION, "loss": None if loss is None else asdict(loss)}


def loss_of(folder: Path) -> Loss | None:
    """Return what the weights in a folder lost; None: it was not measured, or is not known any more."""
    record = read_json(folder / RECORD)
    loss = record.get("loss") if isinstance(record, dict) else None
    if not isinstance(loss, dict) or loss.keys() != {"kl", "same", "tokens"}:
        return None
    return Loss(**loss)
