"""The weights of a job: adapters, calibrated weights, and the warning about quantised products."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.errors import CannotSplit
from batchinfer.data.storage.remembered import read_strings
from batchinfer.data.storage.state import StateFolder
from batchinfer.engine.ranks.parts import check_stored
from batchinfer.job import Job
from batchinfer.models.adapters.stored_adapter import MERGED_WHOLE
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.calibrated import with_calibration
from batchinfer.plan.setup.job_adapters import job_adapters, with_adapters
from batchinfer.plan.setup.resolve import Setting

# Answers that equal those in float32; with bfloat16, 127 do
_KEPT = "on SmolLM2-135M, int8 kept 22 of 200 answers, int4 21 (docs/models.md)"


@dataclass(frozen=True, slots=True)
class JobWeights:
    """A job's model and setting once its weights are chosen; `adapters`: fingerprints by their names."""

    checkpoint: StoredModel
    setting: Setting
    adapters: dict[str, str]


def job_weights(job: Job, checkpoint: StoredModel, setting: Setting, state: StateFolder) -> JobWeights:
    """Choose the weights.

    Raises:
        JobFileError: An adapter cannot be computed, or the checkpoint's zero points fit no layout.
        SecurityRefusal: An adapter cannot be computed.
        CannotSplit: The ranks of the job cannot each read a part of the checkpoint, or of an adapter.
    """
    checkpoint.check_zero_points(read_strings(state.fingerprints))
    held = checkpoint.held_for(setting.quantization)
    adapters = job_adapters(job, held, state)
    setting = with_adapters(setting, job, adapters)
    found, setting = with_calibration(job, held, setting, state, adapters.merged)
    if setting.division.ranks > 1 and isinstance(found, Checkpoint):
        check_stored(found, setting.division)
        if adapters.merged and setting.division.tensor > 1:
            raise CannotSplit(MERGED_WHOLE)
    return JobWeights(found, setting, adapters.fingerprints)


def quantization_warnings(checkpoint: StoredModel, setting: Setting) -> tuple[str, ...]:
    """Return a line if the run quantises the weights; none if it multiplies them as the checkpoint stores them."""
    quantization = setting.quantization
    if quantization == "int8" or (quantization == "int4" and not _stores_int4(checkpoint, setting)):
        return (f"model.quantization: {quantization} changes most answers of real models: {_KEPT}",)
    return ()


def _stores_int4(checkpoint: StoredModel, setting: Setting) -> bool:
    """Return True if the checkpoint itself stores int4. Calibrated weights are made for the job."""
    forms = checkpoint.spec.forms if isinstance(checkpoint, Checkpoint) else frozenset()
    return setting.weights is None and any(form.codes == "int4" for form in forms)
