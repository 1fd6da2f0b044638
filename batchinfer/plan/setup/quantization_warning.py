"""The warning that quantised products change answers."""

from __future__ import annotations

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.plan.setup.job_setup import Setup

# Answers that equal those in float32; with bfloat16, 127 do
MEASURED = "on SmolLM2-135M, int8 kept 22 of 200 answers, int4 21 (docs/models.md)"


def quantization_warnings(setup: Setup) -> list[str]:
    """Return a line if the run quantises the weights; none if it multiplies them as the checkpoint stores them."""
    quantization = setup.setting.quantization
    if quantization == "int8" or (quantization == "int4" and not _stored_in_int4(setup)):
        return [f"model.quantization: {quantization} changes most answers of a real model: {MEASURED}"]
    return []


def _stored_in_int4(setup: Setup) -> bool:
    """Return True if the job's own checkpoint stores int4, rather than the job's calibrated weights."""
    checkpoint, calibrated = setup.checkpoint, setup.setting.weights is not None
    forms = checkpoint.spec.forms if isinstance(checkpoint, Checkpoint) else frozenset()
    return not calibrated and any(form.codes == "int4" for form in forms)
