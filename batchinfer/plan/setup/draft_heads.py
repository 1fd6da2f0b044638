"""The heads that a job names, found right for its model."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.errors import JobFileError
from batchinfer.job import Job
from batchinfer.job.spec import DraftModelSection
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.heads.inspection import inspect_heads
from batchinfer.models.heads.stored_heads import WHERE, StoredHeads, StoredLayer
from batchinfer.models.opening import StoredModel
from batchinfer.plan.setup.resolve import Setting


def draft_heads(job: Job, checkpoint: StoredModel, setting: Setting) -> StoredHeads | None:
    """Return the heads that a job names, if it names any. Raises JobFileError and SecurityRefusal."""
    section = job.drafts
    if not isinstance(section, DraftModelSection) or section.heads is None:
        return None
    if not isinstance(checkpoint, Checkpoint):
        raise job.mistake(
            WHERE, "transformers' code computes the job's model, whose hidden states are not kept"
        )
    if setting.division.ranks > 1:
        raise job.mistake(WHERE, "a model that is divided among ranks has no heads; remove them")
    try:
        heads = inspect_heads(section.heads, checkpoint)
    except JobFileError as error:
        wrong = [replace(one, where=WHERE) for one in error.mistakes]
        with job.located():
            raise JobFileError(str(job.source), wrong) from error
    if isinstance(heads, StoredLayer) and all(window is not None for window in checkpoint.spec.windows):
        raise job.mistake(WHERE, "every layer of the job's model has a window, whose blocks are given up")
    return heads
