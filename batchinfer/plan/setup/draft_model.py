"""The model whose answers are drafts of a job's: smaller than the job's own, with the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import JobFileError
from batchinfer.data.storage.state import StateFolder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.machine.hardware import Hardware
from batchinfer.models.opening import StoredModel, open_checkpoint
from batchinfer.plan.setup.job_weights import job_weights
from batchinfer.plan.setup.resolve import Setting, resolve

_WHERE = "drafts.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model found right. `job` is the job as this model runs it."""

    job: Job
    checkpoint: StoredModel
    setting: Setting
    tokenizer: Tokenizer


def draft_model(
    job: Job, tokenizer: Tokenizer, state: StateFolder, hardware: Hardware | None = None
) -> DraftModel | None:
    """Return the draft model that a job names, if it names one. `tokenizer` is that of the job's own model; `hardware`:
    a machine other than this one. Raises JobFileError, SecurityRefusal and Unavailable."""
    drafting = job.drafting_job
    if drafting is None:
        return None
    try:
        checkpoint = open_checkpoint(drafting.model.path)
        weights = job_weights(drafting, checkpoint, resolve(drafting, checkpoint, hardware), state)
        other = Tokenizer.load(drafting.model.path)
    except JobFileError as error:
        found = [replace(one, where=_WHERE) if one.where == "model.path" else one for one in error.mistakes]
        with job.located():
            raise JobFileError(str(job.source), found) from error
    if _tokens(other) != _tokens(tokenizer):
        raise job.mistake(
            _WHERE,
            f"{drafting.model.path} has other tokens than the job's model: its answers could be no drafts; name a "
            "model with the same tokenizer, such as a smaller one of the same family",
        )
    return DraftModel(drafting, weights.checkpoint, weights.setting, other)


def _tokens(tokenizer: Tokenizer) -> dict[str, int]:
    found: dict[str, int] = tokenizer.rust.get_vocab(with_added_tokens=True)
    return found
